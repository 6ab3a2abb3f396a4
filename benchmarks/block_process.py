"""Transformer blocks in a process of their own, with a compiler's cache of their own: what benchmarks/block.py starts.

A `Job` goes in as JSON, and lines of JSON come out as they are there: of each case how many seconds its first step
took, which compiles it, and its bytes, or why it failed; then of each round the seconds of a step of each case.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import deit, llama
from benchmarks.allocations import of_microbatch, of_microbatch_on_a_gpu
from benchmarks.command import reason, without_expected_warnings
from benchmarks.contenders import calibrated, compiled
from benchmarks.interleaved import Contender, interleaved, seconds
from benchmarks.record import ROOT
from float8_compile.variants import quiet, variant

BYTES = ("after forward", "peak")
CHECKPOINTED = ", checkpointed"  # behind a contender's name: the block runs in torch.utils.checkpoint

Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Job:
    """A model, its cases, and how it is run. batch: images, of a Llama layer nothing. rounds: 0 to compile only."""

    model: str
    cases: Sequence[str]
    batch: int
    backend: str
    rounds: int = 0


def llama_layer(shape: llama.Shape) -> Callable[[int], Built]:
    """A function that builds it; a batch is one sequence, as long as the shape says."""
    return lambda batch: llama.build(shape=shape)


def deit_block(shape: deit.Shape) -> Callable[[int], Built]:
    """A function that builds it, with the tokens of so many images."""

    def build(batch: int) -> Built:
        x = torch.randn(batch, shape.tokens, shape.width, dtype=torch.bfloat16, requires_grad=True)
        return deit.Block(shape).bfloat16(), (x,)

    return build


DEIT_BASE = deit.SHAPES["deit-base"]
MODELS = {
    "llama-3-8b": llama_layer(llama.LLAMA_3_8B),
    "deit-base": deit_block(DEIT_BASE),
    "llama-narrow": llama_layer(llama.Shape(tokens=256, dim=256, hidden=896, heads=8, key_heads=2)),
    "deit-narrow": deit_block(replace(DEIT_BASE, width=192, mlp=768, heads=3)),
    "llama-tiny": llama_layer(llama.Shape(tokens=16, dim=32, hidden=64, heads=2, key_heads=1)),
    "deit-tiny": deit_block(deit.SHAPES["tiny"]),
}


class Case:
    """A block in a variant, forward and backward compiled, in a checkpoint or not."""

    def __init__(self, job: Job, name: str, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            block, self.inputs = MODELS[job.model](job.batch)
            self.gradient = torch.randn_like(self.inputs[0])
            self.block = variant(lambda: (block, ()), name.removesuffix(CHECKPOINTED))()[0]
        calibrated(self.block, lambda: self.block(*self.inputs).backward(self.gradient))
        self.run = compiled(self._checkpointed if name.endswith(CHECKPOINTED) else self.block, job.backend)
        self.forget()

    def forward(self) -> Tensor:
        return self.run(*self.inputs)

    def step(self) -> None:
        self.forward().backward(self.gradient)
        self.forget()

    def memory(self) -> tuple[int, int]:
        """Bytes alive after forward, and the most at one time: the output's and gradients' too, not the model's own."""
        watch = of_microbatch_on_a_gpu if self.gradient.is_cuda else of_microbatch
        forward, _, peak = watch(self.forward, self.gradient)
        self.forget()
        return forward, peak

    def forget(self) -> None:
        """Gradients."""
        self.inputs[0].grad = None
        self.block.zero_grad(set_to_none=True)

    def _checkpointed(self, *inputs: Tensor) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False)


def work(job: Job, tell: Callable[[dict[str, Any]], object]) -> None:
    """Tells what comes out as it is there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps: dict[str, Contender] = {}
    for name in job.cases:
        with quiet(), without_expected_warnings():
            try:
                case = Case(job, name, device)
                told: dict[str, Any] = {"case": name, "first step": seconds(case.step, device)}
                if job.rounds:
                    told |= dict(zip(BYTES, case.memory(), strict=True))
                    steps[name] = case.step
            except Exception as error:  # of one case: those before and after it are worth having
                told = {"case": name, "failed": reason(error)}
        tell(told)
    samples: dict[str, list[float]] = {}

    def after_round(done: int) -> None:
        tell({"round": done, "seconds": {name: times[-1] for name, times in samples.items()}})

    if steps:
        interleaved(steps, job.rounds, device=device, after_round=after_round, samples=samples)


class ProcessError(RuntimeError):
    """As a whole, which none of its cases can tell."""


def started(job: Job, cache: Path) -> Generator[dict[str, Any], None, None]:
    """What `work` tells in a process of its own, whose compiler has this folder for its caches.

    Raises ProcessError, with the last it said, where the process itself comes to grief.
    """
    elsewhere = "TRITON_CACHE_DIR"  # without it Triton's cache lies in Inductor's
    environment = {name: value for name, value in os.environ.items() if name != elsewhere}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "benchmarks.block_process", json.dumps(asdict(job))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, **pipes) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
                with contextlib.suppress(BrokenPipeError):  # it may be over, and its last words say why
                    print(file=process.stdin, flush=True)  # go on: what was done meanwhile disturbs no measurement
            code = process.wait()
        finally:
            process.terminate()  # where nobody listens to the end
        if code:
            errors.seek(0)
            raise ProcessError(f"{job.model}: {(errors.read().strip() or f'exit status {code}').splitlines()[-1]}")


def main() -> None:
    """Lines of JSON on stdout, and nothing else, whatever torch may print. After each it waits until it is read."""
    out = sys.stdout

    def tell(told: dict[str, Any]) -> None:
        print(json.dumps(told), file=out, flush=True)
        sys.stdin.readline()

    with (
        contextlib.redirect_stdout(sys.stderr),
        contextlib.suppress(KeyboardInterrupt),
    ):  # told to who started this, too
        work(Job(**json.loads(sys.argv[1])), tell)


if __name__ == "__main__":
    main()
