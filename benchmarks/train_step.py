"""Whole training steps of scripts/train's language model: bf16, torchao's float8 and ours, compiled, measured in turns.

    python -m benchmarks.train_step                                           # two idle cores about 5 minutes
    python -m benchmarks.train_step --sizes tiny --rounds 50                  # a look
    python -m benchmarks.train_step --contenders torchao:tensorwise tensorwise delayed --out /tmp/some

Needs scripts/ on PYTHONPATH, where the training's code is. Each contender trains a model of its own, from the same
weights on the same bytes. Its blocks are compiled as scripts/train does it, block by block in one graph each
(fullgraph), and all of them share one compilation; delayed scales are as after a step.

    step                what a user waits for: batch, forward, backward, clipping, optimizer
    forward + backward  the same without the last two, which are alike for all
    over bf16, torchao  times as fast as bf16, and as torchao's counterpart, which of delayed is its tensorwise: the
                        median of the rounds' ratios, and their quartiles

A CPU's times say nothing of a GPU's. How long the first step takes is told as it is done, and depends on what the
compiler's caches hold; overhead.py and block.py measure compiling.

Leaves train_step.json, .md and .png in benchmarks/results/ (or in --out), written anew after every ten rounds, and
after Ctrl-C with those that were complete.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import MethodType

import torch
from rich.console import Console
from torch import nn

from benchmarks.command import Live, add_backend, command_line, known, parser_of, reason, without_expected_warnings
from benchmarks.contenders import calibrated
from benchmarks.interleaved import Contender, interleaved, seconds
from benchmarks.record import circumstances
from benchmarks.train_step_table import PASSES, STEP, Result, case, leave, line, report
from byte_lm.data import Text, load_text
from byte_lm.model import Block
from byte_lm.settings import SIZES, Settings, UsageError
from byte_lm.training import Trainer, start_compiler
from float8_compile import Recipe
from float8_compile.torch_internals import with_own_code
from float8_compile.variants import AS_BUILT, CACHED, KEEP, TORCHAO, TORCHAO_RECIPES, quiet

NAME = "train_step"
CONTENDERS = (AS_BUILT, *(TORCHAO + recipe for recipe in TORCHAO_RECIPES), *Recipe.names())
ROUNDS_BETWEEN_FILES = 10


def compile_blocks(blocks: Iterable[nn.Module], backend: str) -> None:
    """As scripts/train does it, with a code of `forward` that only these blocks share.

    Dynamo keeps compilations by code, and blocks of all trainers have that of `Block.forward`: the ninth contender's
    would be an error, and each call would ask the others' guards first.
    """
    forward = with_own_code(Block.forward)
    for block in blocks:
        block.forward = MethodType(forward, block)
        block.compile(fullgraph=True, backend=backend)


def graphs_compiled() -> int:
    """By Dynamo, in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def prepared(name: str, settings: Settings, text: Text, backend: str, live: Live) -> dict[str, Contender]:
    """What is measured of a contender, by its name in the table, with all that is to be compiled done.

    Raises RuntimeError where nothing was: fullgraph=True refuses a frame that can't be compiled, but not a setting that
    has everything run eagerly.
    """
    trainer = Trainer(settings, name, text)

    def passes() -> None:
        trainer.loss(trainer.batch()).backward()
        trainer.optimizer.zero_grad()

    calibrated(trainer.model, passes)
    compile_blocks(trainer.model.blocks, backend)
    before, device = graphs_compiled(), trainer.model.rotary.device.type
    # Before and after an optimizer step, and one pass after another: what asks for a graph of its own gets it here.
    first, *_ = (seconds(call, device) for call in (trainer.step, passes, passes, trainer.step, passes))
    if graphs_compiled() == before:
        raise RuntimeError("its blocks were not compiled, and ran eagerly")
    live.say(f"{settings.size}, {name}: first step {first:.1f} s, with compilation")
    return {STEP: trainer.step, PASSES: passes}


def measure(
    result: Result, names: Sequence[str], text: Text, backend: str, rounds: int, live: Live, done: Contender
) -> None:
    """All contenders at one size: prepared one after the other, then timed in turns. Fills `result`.

    done: called after some rounds, and after the last.
    """
    settings = Settings(
        recipes=tuple(names), size=result.size, steps=SIZES[result.size].steps, batch=SIZES[result.size].batch, seed=0,
        data=None, compile=False,  # which `prepared` does
    )  # fmt: skip
    calls = dict[str, Contender]()
    for name in names:
        live.prepare(name)
        with quiet():
            try:
                found = prepared(name, settings, text, backend, live)
            except Exception as error:  # row-wise GEMMs of a GPU may not take a shape: the others are worth it
                result.failed[name] = reason(error)
                live.say(f"{result.size}, {name} failed: {result.failed[name]}")
                continue
        calls |= {case(part, name): call for part, call in found.items()}
    before = graphs_compiled()

    def after_round(number: int) -> None:
        if graphs_compiled() != before:
            raise RuntimeError(f"round {number}: a block was compiled anew, and that was measured with the steps")
        live.round(number)
        if number % ROUNDS_BETWEEN_FILES == 0 or number == rounds:
            done()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    interleaved(calls, rounds, device=device, after_round=after_round, samples=result.samples)


def method(device: str, backend: str) -> str:
    """In words, how the numbers came about."""
    not_a_gpu = "" if device == "cuda" else " Times on a CPU say nothing of a GPU's."
    return (
        f"Training scripts/train's model, its blocks compiled by {backend} (fullgraph). A step is batch, forward, "
        f"backward, clipping and optimizer; forward + backward is all but the last two. Medians of interleaved rounds; "
        f"speed-ups are medians of the rounds' ratios, with their quartiles, over bf16 and over torchao's same recipe, "
        f"which for delayed is its tensorwise.{not_a_gpu}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each contender is ready and as each size is done, and the tables at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = "base" if device == "cuda" else "small"
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=50 if device == "cuda" else 20)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=(size,), help=f"default: {size}")
    parser.add_argument("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    add_backend(parser)
    given = parser.parse_args(arguments)
    names, sizes = known(parser, given.contenders), list(dict.fromkeys(given.sizes))
    if variants := [name for name in names if name.endswith((KEEP, CACHED))]:
        parser.error(f"{variants[0]!r}: scripts/train's model has no weights that are kept or cached")
    try:
        text = load_text(given.data, max(SIZES[size].context for size in sizes))
    except UsageError as error:
        parser.error(str(error))
    about = circumstances(command_line(NAME, arguments)) | {"device": device, "rounds": given.rounds, "unit": "ms"}
    about |= {"method": method(device, given.backend)}
    results: list[Result] = []
    stopped = False

    def done() -> None:
        if shown := [result for result in results if result.rounds]:
            leave(given.out, NAME, shown, about)

    try:
        with Live(Console()) as live, without_expected_warnings():
            if given.backend == "inductor":
                start_compiler()
            for size in sizes:
                live.begin(size, given.rounds)
                results.append(Result(size))
                measure(results[-1], names, text, given.backend, given.rounds, live, done)
                live.end(line(results[-1]))
                torch.compiler.reset()
    except KeyboardInterrupt:
        stopped = True
        print("stopped", file=sys.stderr)
        done()
    if shown := [result for result in results if result.rounds]:
        print(f"\n{report(shown, about)}\nin {given.out}: {NAME}.json, .md, .png")
    return 130 if stopped else int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
