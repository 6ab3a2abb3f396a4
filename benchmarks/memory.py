"""Memory and speed of training vision transformers, of 87 and of 574 million parameters, in each variant.

    python -m benchmarks.memory                                            # two idle cores 5 minutes, busy ones 17
    python -m benchmarks.memory --models deit-base --contenders bf16 tensorwise tensorwise+cached+flat --out /tmp/some

A contender is a variant of float8_compile/variants.py; "+flat" behind it accumulates gradients in FlatGradients, in
float32, else they are accumulated in `.grad`, in bfloat16. Converted are the blocks, not the first and the last layer.

Parameters, gradients and cast weights that are cached are the model's own. Beyond these, in the second microbatch of a
step, so that there are gradients to add to:

    after forward     bytes alive when the loss is there: what is kept for backward
    after backward    what is still alive then, with the loss
    peak              the most at one time

tokens/s is that of a step, two microbatches and SGD, which has no state of its own: medians of interleaved rounds.

A block is compiled, once for all blocks of a model. On a GPU bytes are those of torch.cuda.memory_allocated. On a CPU
they are those of torch's profiler, without what is allocated inside `aten::_scaled_mm`: a CPU without float8 multiplies
in float32, for which it copies both operands. Its tokens/s say nothing of a GPU's. To spare a CPU the time, deit-570m
is counted there, not measured: models of one and of two blocks are run, and the second block's share is taken as often
as there are blocks.

Leaves memory.json, .md and .png in benchmarks/results/ (or in --out), written anew after each contender, so what is
done survives Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.allocations import of_microbatch, of_microbatch_on_a_gpu
from benchmarks.command import add_backend, command_line, count, known, parser_of
from benchmarks.contenders import compiled
from benchmarks.deit import SHAPES, Deit, Shape
from benchmarks.interleaved import seconds
from benchmarks.look import bars, picture
from benchmarks.record import circumstances, made_by, markdown, write, write_json
from float8_compile import FlatGradients
from float8_compile.linear import Float8Linear
from float8_compile.variants import AS_BUILT, CACHED, KEEP, TORCHAO, quiet, variant

NAME = "memory"
FLAT = "+flat"
MODELS = ("deit-base", "deit-570m")
CONTENDERS = (
    AS_BUILT,
    f"{TORCHAO}tensorwise",
    "tensorwise",
    f"tensorwise{KEEP}",
    f"tensorwise{CACHED}",
    "delayed",
    f"delayed{KEEP}",
    f"delayed{CACHED}",
    f"delayed{KEEP}{CACHED}",
    f"{AS_BUILT}{FLAT}",
    f"tensorwise{FLAT}",
)
MICROBATCHES = 2
WIDTH = 125  # columns that a table takes on a terminal
COUNTED_ON_A_CPU = ("deit-570m",)
COUNTED_FROM = (1, 2)  # blocks
MEASURED, COUNTED = "measured", "counted"

OWN = ("parameters", "gradients", "cache")
BEYOND = ("after forward", "after backward", "peak")
# Okabe and Ito's hues, which colour-blind readers can tell apart.
COLOURS = {
    "parameters": "#555555",
    "gradients": "#BBBBBB",
    "cache": "#E69F00",
    "after forward": "#0072B2",
    "peak": "#D55E00",
}


@dataclass
class Row:
    """One contender in one model. how: MEASURED or COUNTED. nbytes: by OWN and BEYOND. speeds: tokens/s by round."""

    how: str
    nbytes: dict[str, int]
    speeds: list[float] = dataclasses.field(default_factory=list)


@dataclass
class Result:
    """One model."""

    model: str
    parameters: int
    batch: int
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)


RunBlock = Callable[[nn.Module, Tensor], Tensor]


class Training:
    """A contender: its model, data and optimizer."""

    def __init__(self, shape: Shape, name: str, batch: int, device: str, run: RunBlock) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Deit(shape, run).bfloat16()
            self.patches = torch.randn(batch, shape.patches, shape.pixels, dtype=torch.bfloat16)
            self.classes = torch.randint(shape.classes, (batch,))
        variant(lambda: (self.model.blocks, ()), name.removesuffix(FLAT))()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)
        self.flat = FlatGradients(self.model.parameters()) if name.endswith(FLAT) else None
        if self.flat is not None:
            self.flat.attach(self.optimizer)

    def loss(self) -> Tensor:
        return functional.cross_entropy(self.model(self.patches).float(), self.classes)

    def step(self) -> None:
        for _ in range(MICROBATCHES):
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> dict[str, int]:
        """By OWN and BEYOND, of a second microbatch."""
        self.loss().backward()  # compiles
        gc.collect()
        watch = of_microbatch_on_a_gpu if self.patches.is_cuda else of_microbatch
        forward, backward, peak = watch(self.loss)
        own = dict(zip(OWN, self._own(), strict=True))
        self.optimizer.zero_grad()
        return own | dict(zip(BEYOND, (forward, backward, peak), strict=True))

    def _own(self) -> tuple[int, int, int]:
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters] if self.flat is None else [self.flat.flat]
        layers = [layer for layer in self.model.modules() if isinstance(layer, Float8Linear)]
        cache = sum(layer.cached_weight.nbytes for layer in layers if layer.cached_weight is not None)
        return _nbytes(*parameters), _nbytes(*gradients), cache


def one_for_all(backend: str) -> RunBlock:
    """How a model calls its blocks: one compiled function."""
    return compiled(lambda block, x: block(x), backend)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def counted(shape: Shape, name: str, batch: int, device: str, backend: str) -> dict[str, int]:
    """`Training.memory` of the whole model, from models of one and of two blocks. Exact where each block adds the same,
    and the peak is in the last block's backward, when everything that forward keeps is there."""
    run = one_for_all(backend)
    one, two = (
        Training(dataclasses.replace(shape, blocks=blocks), name, batch, device, run).memory()
        for blocks in COUNTED_FROM
    )
    return {key: one[key] + (shape.blocks - 1) * (two[key] - one[key]) for key in one}


def parameters(shape: Shape) -> int:
    """How many the model has."""
    with torch.device("meta"):
        return sum(p.numel() for p in Deit(shape).parameters())


def measure(
    result: Result, names: Sequence[str], device: str, backend: str, rounds: int, done: Callable[[str], object]
) -> None:
    """Fills the result's rows: bytes of one contender after the other, then rounds of all. `done` after each."""
    shape, trainings = SHAPES[result.model], dict[str, Training]()
    for name in names:
        start = time.perf_counter()
        with quiet():
            if device == "cpu" and result.model in COUNTED_ON_A_CPU:
                row = Row(COUNTED, counted(shape, name, result.batch, device, backend))
            else:
                trainings[name] = Training(shape, name, result.batch, device, one_for_all(backend))
                row = Row(MEASURED, trainings[name].memory())
        result.rows[name] = row
        words = ", ".join(f"{key} {_megabytes(nbytes)}" for key, nbytes in row.nbytes.items())
        done(f"{result.model}, {name} ({time.perf_counter() - start:.0f} s), {row.how}, MB: {words}")
    order, shuffled = list(trainings), random.Random(0)
    for number in range(rounds if trainings else 0):
        shuffled.shuffle(order)
        for name in order:
            tokens = MICROBATCHES * result.batch * shape.tokens
            result.rows[name].speeds.append(tokens / seconds(trainings[name].step, device))
        done(f"{result.model}: {number + 1} of {rounds} rounds")


def figures(row: Row) -> dict[str, str]:
    """Of one contender, for people: megabytes, and tokens/s or "-"."""
    speed = f"{statistics.median(row.speeds):,.0f}" if row.speeds else "-"
    return {key: _megabytes(row.nbytes[key]) for key in (*OWN, *BEYOND)} | {"tokens/s": speed, "bytes are": row.how}


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"


def heading(result: Result) -> str:
    """Says what a table is of."""
    shape = SHAPES[result.model]
    return (
        f"{result.model}: {shape.blocks} blocks of width {shape.width}, {result.parameters / 1e6:.1f} M parameters, "
        f"{result.batch} x {shape.tokens} tokens"
    )


def leave(folder: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    results = [result for result in results if result.rows]
    if not results:
        return
    models = {r.model: dataclasses.asdict(SHAPES[r.model]) | _document(r) for r in results}
    write_json(folder / f"{NAME}.json", {**about, "unit": "bytes, tokens/s", "models": models})
    tables = [
        f"{heading(result)}\n\n" + markdown([{"MB": name} | figures(row) for name, row in result.rows.items()])
        for result in results
    ]
    write(folder / f"{NAME}.md", "\n".join([f"{made_by(about)} {about['method']}\n", *tables]))
    draw(folder / f"{NAME}.png", results, about["machine"])


def _document(result: Result) -> dict[str, Any]:
    rows = {
        name: {"how": row.how}
        | row.nbytes
        | {"tokens/s": round(statistics.median(row.speeds), 1) if row.speeds else None}
        | {"rounds": [round(speed, 1) for speed in row.speeds]}
        for name, row in result.rows.items()
    }
    return {"parameters": result.parameters, "batch": result.batch, "contenders": rows}


def draw(path: Path, results: Sequence[Result], machine: str) -> None:
    """Writes a PNG, a row of two pictures for each model: what is its own, and what comes on top."""
    heights = [1.2 + 0.36 * len(result.rows) for result in results]
    with picture(path, 12, 1.0 + sum(heights), f"Training memory by variant, on {machine}") as figure:
        grid = figure.subplots(len(results), 2, squeeze=False, sharey="row", height_ratios=heights)
        for (own, beyond), result in zip(grid, results, strict=True):
            names = [name if row.how == MEASURED else f"{name} (counted)" for name, row in result.rows.items()]
            _bars_in_a_row(own, result.rows)
            groups = {
                key: (COLOURS[key], [row.nbytes[key] / 1e6 for row in result.rows.values()])
                for key in ("after forward", "peak")
            }
            bars(beyond, names, groups)
            own.set_title(heading(result), loc="left", fontsize=10)
            own.set_xlabel("MB, the model's own, between microbatches")
            beyond.set_xlabel("MB beyond that, in a microbatch")
        handles, labels = (
            [*first, *second]
            for first, second in zip(*(axes.get_legend_handles_labels() for axes in grid[0]), strict=True)
        )
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)


def _bars_in_a_row(axes: Any, rows: Mapping[str, Row]) -> None:
    left = [0.0] * len(rows)
    for key in OWN:
        widths = [row.nbytes[key] / 1e6 for row in rows.values()]
        axes.barh(range(len(rows)), widths, left=left, height=0.7, color=COLOURS[key], label=key)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for place, end in enumerate(left):
        axes.text(end, place, f" {end:,.0f}" if max(left) >= 10 else f" {end:.2f}", va="center", fontsize=7.5)
    axes.set_xlim(0, 1.1 * max(left))


def table(result: Result) -> Table:
    """A result for a terminal."""
    rows = [{"MB": name} | figures(row) for name, row in result.rows.items()]
    drawn = Table(box=SIMPLE_HEAD, title=heading(result), title_justify="left")
    for number, column in enumerate(rows[0]):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row.values())
    return drawn


def method(device: str, backend: str, rounds: int) -> str:
    """In words, how the numbers came about."""
    bytes_of = (
        "bytes are torch.cuda's"
        if device == "cuda"
        else "bytes are the profiler's, without those inside aten::_scaled_mm, where a CPU multiplies in float32; "
        "tokens/s are a CPU's, and say nothing of a GPU's"
    )
    return (
        f"Blocks compiled by {backend}. After forward, after backward and peak are of a second microbatch, beyond "
        f"parameters, gradients (bfloat16; {FLAT}: float32) and cached casts; {bytes_of}. tokens/s: medians of "
        f"{rounds} interleaved steps of {MICROBATCHES} microbatches with SGD. What is {COUNTED} was not measured, but "
        f"computed from models of {COUNTED_FROM[0]} and {COUNTED_FROM[1]} blocks."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each contender and each round is done, and the tables at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=20 if device == "cuda" else 3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS, help="default: all but tiny, a trial")
    parser.add_argument("--batch", type=count, help="images (default: 64 on a GPU, 1 on a CPU)")
    add_backend(parser)
    given = parser.parse_args(arguments)
    names = known(parser, given.contenders, flag=FLAT)

    about = circumstances(command_line(NAME, arguments))
    about |= {"device": device, "method": method(device, given.backend, given.rounds)}
    batch, console, results = given.batch or (64 if device == "cuda" else 1), Console(), list[Result]()
    stopped = False

    def done(words: str) -> None:
        console.print(words, highlight=False, soft_wrap=True)
        leave(given.out, results, about)

    try:
        for model in dict.fromkeys(given.models):
            results.append(Result(model, parameters(SHAPES[model]), batch))
            measure(results[-1], names, device, given.backend, given.rounds, done)
            gc.collect()
    except KeyboardInterrupt:
        stopped = True
        print("stopped", file=sys.stderr)
    for result in results:
        if result.rows:
            Console(width=max(console.width, WIDTH)).print(table(result))
    if any(result.rows for result in results):
        print(f"in {given.out}: {NAME}.json, .md, .png")
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
