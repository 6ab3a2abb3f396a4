"""What FSDP2 keeps and sends with float8 weights: kept, cast again or gathered again, in float8 or bfloat16.

    python -m benchmarks.fsdp_memory                                                     # counted; two cores 2 minutes
    torchrun --nproc-per-node 8 -m benchmarks.fsdp_memory --blocks 24 --batch 64         # measured, on GPUs

A contender is a variant of float8_compile/variants.py; "+gather" behind it gathers its weights in float8. Blocks of
deit-570m in bfloat16, each compiled and `fully_shard`ed by itself (reshard_after_forward=True), then the whole model.

Of a second step of one rank:

    sent              bytes that a rank gives to all-gathers, forward and backward
    after forward     bytes alive when the loss is there, beyond parameters: activations, and weights that are kept
    peak              the most at one time, with gathered weights and unsharded gradients
    steps/s           forward, backward and SGD; only where there are GPUs

Without GPUs the other ranks are torch's fake process group: what is sent and allocated is counted, no number is
exchanged, and no time is taken. Allocations are those of torch's profiler (allocations.py).
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.allocations import of_microbatch, of_microbatch_on_a_gpu
from benchmarks.command import add_backend, command_line, count, parser_of
from benchmarks.deit import SHAPES, Deit, Shape
from benchmarks.interleaved import interleaved
from benchmarks.look import bars, picture
from benchmarks.record import circumstances, made_by, markdown, write, write_json
from float8_compile.convert import convert_to_float8_training
from float8_compile.recipe import Recipe
from float8_compile.variants import AS_BUILT, KEEP, TORCHAO, quiet

NAME = "fsdp_memory"
GATHER = "+gather"
CONTENDERS = (
    AS_BUILT,
    f"{TORCHAO}tensorwise",
    f"{TORCHAO}tensorwise{GATHER}",
    *(
        f"{recipe}{keep}{gather}"
        for recipe in ("tensorwise", "delayed")
        for gather in ("", GATHER)
        for keep in ("", KEEP)
    ),
    "rowwise",
    f"rowwise{GATHER}",
)
BARS = {"after forward": "#0072B2", "peak": "#D55E00"}


@dataclass
class Row:
    """One contender; bytes of one rank. steps: a second, or None."""

    sent: int
    forward: int
    peak: int
    steps: float | None = None


class Sent(TorchDispatchMode):
    """Counts the bytes that are given to all-gathers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.nbytes += args[1].numel() * args[1].element_size()
        return func(*args, **(kwargs or {}))


class Training:
    """A contender: its sharded model, data and optimizer."""

    def __init__(self, name: str, shape: Shape, batch: int, device: str, backend: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Deit(shape).bfloat16()
            self.patches = torch.randn(batch, shape.patches, shape.pixels, dtype=torch.bfloat16)
            self.classes = torch.randint(shape.classes, (batch,))
        convert(self.model.blocks, name)
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        for block in self.model.blocks:
            block.compile(backend=backend, dynamic=False)
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)

    def loss(self) -> Tensor:
        return functional.cross_entropy(self.model(self.patches).float(), self.classes)

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def row(self) -> Row:
        """Of a second step."""
        self.step()  # compiles
        gc.collect()
        with Sent() as sent:
            self.step()
        watch = of_microbatch_on_a_gpu if self.patches.is_cuda else of_microbatch
        forward, _, peak = watch(self.loss)
        return Row(sent.nbytes, forward, peak)


def convert(model: nn.Module, name: str) -> None:
    """As the contender's name says. Raises ValueError for an unknown one, ModuleNotFoundError without torchao."""
    gather, base = name.endswith(GATHER), name.removesuffix(GATHER)
    if base == AS_BUILT and not gather:
        return
    if base.startswith(TORCHAO):
        from torchao.float8 import CastConfig, Float8LinearConfig
        from torchao.float8 import convert_to_float8_training as convert_by_torchao

        if base != f"{TORCHAO}tensorwise":
            raise ValueError(f"{name!r}: torchao gathers tensorwise weights only")
        weight = CastConfig()
        convert_by_torchao(
            model, config=Float8LinearConfig(cast_config_weight=weight, enable_fsdp_float8_all_gather=gather)
        )
        return
    recipe = replace(Recipe.from_name(base.removesuffix(KEEP)), fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=recipe, recompute_weight_cast=not base.endswith(KEEP))


def start(ranks: int) -> str:
    """The process group: torchrun's on GPUs, else a fake one of so many ranks. Returns the device's type."""
    if torch.cuda.is_available() and "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        return "cuda"
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return "cpu"


def figures(row: Row) -> dict[str, str]:
    """Of one contender, for people."""
    numbers = {"sent": row.sent, "after forward": row.forward, "peak": row.peak}
    speed = "-" if row.steps is None else f"{row.steps:.2f}"
    return {key: f"{nbytes / 1e6:,.1f}" for key, nbytes in numbers.items()} | {"steps/s": speed}


def leave(folder: Path, rows: dict[str, Row], about: dict[str, Any]) -> None:
    """The three files, of what there is so far."""
    write_json(folder / f"{NAME}.json", {**about, "contenders": {name: asdict(row) for name, row in rows.items()}})
    table = markdown([{"MB a rank": name} | figures(row) for name, row in rows.items()])
    write(folder / f"{NAME}.md", f"{made_by(about)} {about['method']}\n\n{table}")
    draw(folder / f"{NAME}.png", rows, about["method"])


def draw(path: Path, rows: dict[str, Row], title: str) -> None:
    """Writes a PNG: for each contender what is alive after forward, and the peak."""
    megabytes = zip(*((row.forward / 1e6, row.peak / 1e6) for row in rows.values()), strict=True)
    with picture(path, 9, 1.4 + 0.42 * len(rows), title) as figure:
        axes = figure.subplots()
        bars(axes, list(rows), {key: (hue, of) for (key, hue), of in zip(BARS.items(), megabytes, strict=True)})
        axes.set_xlabel("MB a rank, beyond parameters")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each contender is done, and the table at the end."""
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=20)
    parser.add_argument("--model", choices=SHAPES, default="deit-570m", help="default: %(default)s")
    parser.add_argument("--blocks", type=count, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=count, default=1, help="images a rank (default: %(default)s)")
    parser.add_argument("--ranks", type=count, default=8, help="of the fake process group (default: %(default)s)")
    add_backend(parser)
    given = parser.parse_args(arguments)
    try:
        for name in given.contenders:
            convert(nn.Linear(16, 16), name)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    device = start(given.ranks)
    ranks, shape = torch.distributed.get_world_size(), replace(SHAPES[given.model], blocks=given.blocks)
    how = "Measured" if device == "cuda" else "Counted, with a fake process group"
    about = circumstances(command_line(NAME, arguments)) | {
        "method": f"{how}: one of {ranks} ranks, {shape.blocks} blocks of width {shape.width}, "
        f"{given.batch} x {shape.tokens} tokens, bfloat16, blocks compiled by {given.backend}."
    }
    console, rows, trainings = Console(), dict[str, Row](), dict[str, Training]()
    speaks = torch.distributed.get_rank() == 0
    for name in dict.fromkeys(given.contenders):
        torch.compiler.reset()
        with quiet():
            training = Training(name, shape, given.batch, device, given.backend)
            rows[name] = training.row()
        if device == "cuda":
            trainings[name] = training
        if speaks:
            console.print(name, figures(rows[name]), highlight=False, soft_wrap=True)
            leave(given.out, rows, about)
    if trainings:
        samples = interleaved({name: t.step for name, t in trainings.items()}, given.rounds, device=device)
        for name, seconds in samples.items():
            rows[name].steps = 1 / statistics.median(seconds)
    if speaks:
        leave(given.out, rows, about)
        console.print(markdown([{"MB a rank": name} | figures(row) for name, row in rows.items()]), highlight=False)
        print(f"in {given.out}: {NAME}.json, .md, .png")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
