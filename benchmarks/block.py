"""Forward and backward of a transformer block in each variant, with and without activation checkpointing.

    python -m benchmarks.block                                                    # two idle cores about 15 minutes
    python -m benchmarks.block --models deit-narrow --contenders bf16 delayed --compile-rounds 0 --out /tmp/some
    python -m benchmarks.block --models llama-3-8b --contenders bf16 torchao:tensorwise tensorwise delayed   # on a GPU

A layer of Llama-3-8B (8192 tokens) and a block of DeiT-base (64 images) on a GPU; narrow ones on a CPU, whose times say
nothing of a GPU's. A contender is a variant of float8_compile/variants.py, compiled (fullgraph), delayed scales as
after a step; "checkpointed" is the same in torch.utils.checkpoint, which runs forward, casts and all, once more.

    step           of forward and backward: medians and quartiles of interleaved rounds, and the median of the rounds'
                   speed-ups over bf16, which on the checkpointed side is checkpointed, too. Of "+cached" it is a
                   microbatch between two optimizer steps: its weights were cast before
    after forward  bytes alive then, with the output: what a model has as often as it has blocks
    peak           the most at one time, with this block's gradients
    first step     with compilation, in a process of its own: cold, with an empty cache; warm, in a second process with
                   the cache that the first one left

Bytes are those of torch.cuda.memory_allocated, on a CPU those of torch's profiler (allocations.py). All is done in
other processes, with caches in a temporary folder: what the compiler has cached for you neither helps nor changes.

Leaves block.json, .md and .png in benchmarks/results/ (or in --out), written anew after each item, so what is done
survives Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.block_process import BYTES, MODELS, Job, ProcessError, started
from benchmarks.block_table import SIDES, Result, Row, leave, line, report
from benchmarks.command import Live, add_backend, command_line, count, known, parser_of
from benchmarks.record import circumstances
from float8_compile import Recipe
from float8_compile.variants import AS_BUILT, CACHED, KEEP, TORCHAO, TORCHAO_RECIPES

NAME = "block"
ON_A_GPU, ON_A_CPU = ("llama-3-8b", "deit-base"), ("llama-narrow", "deit-narrow")
CONTENDERS = (
    AS_BUILT,
    *(TORCHAO + recipe for recipe in TORCHAO_RECIPES),
    *(recipe + keep for recipe in Recipe.names() for keep in ("", KEEP)),
    f"delayed{CACHED}",
    f"delayed{KEEP}{CACHED}",
)
CHEAP = (AS_BUILT, f"{TORCHAO}tensorwise", "delayed")  # for a CPU, where a cold compilation takes most of a minute


class Benchmark:
    """A run of the command: what is measured, what has come out, and where it goes."""

    def __init__(self, given: argparse.Namespace, cases: Sequence[str], about: Mapping[str, Any], live: Live) -> None:
        self.given, self.cases, self.about, self.live = given, cases, about, live
        self.results: list[Result] = []

    def measure(self, model: str, caches: Path) -> None:
        """One model; `caches` is a folder for the compiler's."""
        self.results.append(Result(model, {case: Row() for case in self.cases}))
        job, common = Job(model, self.cases, self.given.batch, self.given.backend), caches / "common"
        common.mkdir(parents=True)
        if self.given.compile_rounds:
            self.live.begin(f"{model}, first steps", self.given.compile_rounds * len(self.cases))
        for number in range(self.given.compile_rounds):
            for done, case in enumerate(random.Random(number).sample(self.cases, len(self.cases)), 1):
                self._first_steps(replace(job, cases=[case]), caches / f"{number}-{done}", common)
                self.live.round(number * len(self.cases) + done)
        self.live.begin(f"{model}, steps", self.given.rounds)
        self._steps(replace(job, rounds=self.given.rounds), common)
        self.live.end(f"{model}: {self.given.rounds} rounds")

    def _first_steps(self, job: Job, cache: Path, common: Path) -> None:
        """Of one case, cold and warm. What the cache has then, the common one gets too."""
        (case,) = job.cases
        cache.mkdir()
        row = self.results[-1].rows[case]
        for samples in (row.cold, row.warm):
            if row.failed is None:
                for told in started(job, cache):
                    self._take(told, samples)
        shutil.copytree(cache, common, dirs_exist_ok=True)
        shutil.rmtree(cache)
        self._leave(case)

    def _steps(self, job: Job, cache: Path) -> None:
        """Bytes of each case, then rounds of all, in one process, for which what is compiled lies ready."""
        rows = self.results[-1].rows
        working = [case for case in job.cases if rows[case].failed is None]
        with contextlib.closing(started(replace(job, cases=working), cache)) as tellings:
            for told in tellings:
                if "case" in told:
                    self._take(told, [])
                    self._leave(told["case"])
                    continue
                for case, seconds in told["seconds"].items():
                    rows[case].seconds.append(seconds)
                self.live.round(told["round"])
                if told["round"] % 10 == 0 or told["round"] == job.rounds:
                    self.leave()

    def _take(self, told: Mapping[str, Any], first_steps: list[float]) -> None:
        row = self.results[-1].rows[told["case"]]
        row.failed = told.get("failed")
        row.nbytes |= {key: told[key] for key in BYTES if key in told}
        if row.failed is None:
            first_steps.append(told["first step"])

    def _leave(self, case: str) -> None:
        self.live.say(line(self.results[-1], case))
        self.leave()

    def leave(self) -> None:
        """The three files, of what there is so far."""
        leave(self.given.out, NAME, self.results, self.about)


def method(device: str, given: argparse.Namespace) -> str:
    """In words, how the numbers came about."""
    bytes_of = (
        "bytes are torch.cuda's" if device == "cuda" else "bytes are the profiler's, and times say nothing of a GPU's"
    )
    first = f" First steps are medians of {given.compile_rounds} in processes of their own." * bool(
        given.compile_rounds
    )
    return (
        f"Compiled by {given.backend} (fullgraph). Steps are forward and backward, medians of {given.rounds} "
        f"interleaved rounds; speed-ups are over {AS_BUILT} on the same side, checkpointed or not; {bytes_of}.{first}"
    )


def rounds_of_compilation(text: str) -> int:
    """An argument that is 0 or more."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each item is done, and the tables at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_a_gpu = device == "cuda"
    models, contenders = (ON_A_GPU, CONTENDERS) if on_a_gpu else (ON_A_CPU, CHEAP)
    parser = parser_of(NAME, __doc__, contenders, rounds=50 if on_a_gpu else 20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models, help=f"default: {', '.join(models)}")
    parser.add_argument(
        "--batch", type=count, default=64 if on_a_gpu else 1, help="DeiT's images (default: %(default)s)"
    )
    parser.add_argument(
        "--compile-rounds",
        type=rounds_of_compilation,
        metavar="ROUNDS",
        default=3 if on_a_gpu else 2,
        help="of first steps; 0 leaves them out (default: %(default)s)",
    )
    add_backend(parser)
    given = parser.parse_args(arguments)
    cases = [name + behind for name in known(parser, given.contenders) for behind in SIDES.values()]
    about = circumstances(command_line(NAME, arguments)) | {"device": device, "rounds": given.rounds}
    about |= {"compile_rounds": given.compile_rounds, "batch": given.batch, "unit": "ms, bytes, s"}
    about |= {"method": method(device, given)}
    code = 0
    with Live(Console()) as live, tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(given, cases, about, live)
        try:
            for model in dict.fromkeys(given.models):
                benchmark.measure(model, Path(folder) / model)
        except (KeyboardInterrupt, ProcessError) as stop:
            code = 1 if isinstance(stop, ProcessError) else 130
            print(str(stop) or "stopped", file=sys.stderr)
        if benchmark.results:
            benchmark.leave()
    if benchmark.results:
        print(f"\n{report(benchmark.results, about)}\nin {given.out}: {NAME}.json, .md, .png")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends as Ctrl-C does, with all processes
    sys.exit(main())
