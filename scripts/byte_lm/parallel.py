"""One model trained by several processes: how they start, share the work, and agree on what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import parse_args, run
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from byte_lm.model import Block, ByteLM
from byte_lm.settings import BASELINE, PARALLEL, Settings, UsageError
from float8_compile import Float8Linear
from float8_compile.distributed import Float8ColwiseParallel, Float8RowwiseParallel

Value = TypeVar("Value")


def started() -> int | None:
    """How many processes torchrun has started, or None where this is a process of its own."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def will_lead() -> bool:
    """Whether this is the process that prints and writes, before all have found each other."""
    return os.environ.get("RANK", "0") == "0"


def check(settings: Settings) -> None:
    """Raises UsageError for what the processes could not do together."""
    kind, count, shape = settings.parallel, settings.processes, settings.shape
    if started() not in (None, count):
        raise UsageError(f"this is a run of {count} processes, and torchrun started {started()}")
    if kind is None and count > 1:
        raise UsageError(f"say how {count} processes share the work: --parallel {', '.join(PARALLEL)}")
    if settings.float8_all_gather and kind != "fsdp2":
        raise UsageError("--float8-all-gather is about weights that --parallel fsdp2 gathers")
    if settings.float8_all_gather and settings.recipes == (BASELINE,):
        raise UsageError(f"--float8-all-gather needs a float8 recipe, and {BASELINE} is none")
    if kind is None:
        return
    if kind == "tp" and shape.heads % count:
        raise UsageError(
            f"--parallel tp gives each process the same number of heads: {shape.heads} are not {count} x n"
        )
    if kind != "tp" and settings.batch % count:
        raise UsageError(
            f"--parallel {kind} gives each process the same part of a step: {settings.batch} sequences are not "
            f"{count} x n; see --batch-size"
        )
    if kind != "ddp" and settings.optimizer == "adamw8":
        raise UsageError(
            f"--optimizer adamw8 goes with ddp only: {kind} splits states, and torchao's in a checkpoint can't be split"
        )
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    if torch.cuda.is_available() and on_this_machine > torch.cuda.device_count():
        raise UsageError(f"{on_this_machine} processes need a GPU each, and there are {torch.cuda.device_count()}")


def launch(count: int, arguments: Sequence[str]) -> int:
    """What torchrun does, from here: one process that ends ends all. Returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # After the dashes nothing is taken for an option of torchrun, which knows --nproc for short.
    options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={count}", "--module", "--", "byte_lm"]
    try:
        run(parse_args([*options, *arguments]))
    except SignalException as signal:  # handed on to all of them, each of which has ended by now
        return 128 + signal.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"scripts/train: process {rank} failed, and ended all: {_last_line(failure.message)}", file=sys.stderr)
        return 1
    return 0


def _last_line(message: Any) -> str:
    text = message["message"] if isinstance(message, dict) else message
    return str(text).strip().splitlines()[-1]


class Team:
    """The processes that train one model, as each of them sees it; a process of its own is a team of one.

    leads: whether this one prints and writes. Where it says collective, all must call it, in the same order.
    """

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if kind else (0, 1)
        self.leads = self.rank == 0

    def share(self, model: ByteLM) -> nn.Module:
        """Splits or replicates the converted model, in place, and returns what is to be called instead of it."""
        if self.kind is None:
            return model
        if self.kind == "ddp":
            return DistributedDataParallel(model)
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for block in model.blocks:
            assert isinstance(block, Block)
            if self.kind == "fsdp2":
                fully_shard(block, mesh=mesh)
                continue
            block.attention.heads //= self.size
            _interleave(block.attention.qkv.weight, 3, self.size)
            _interleave(block.mlp.gate_up.weight, 2, self.size)
            parallelize_module(block, mesh, {name: _style(block.get_submodule(name), name) for name in SPLIT_ALONG})
        if self.kind == "fsdp2":
            fully_shard(model, mesh=mesh)
        return model

    def own_rows(self, rows: Tensor) -> Tensor:
        """This process's part of a batch; under tp all of it."""
        return rows if self.kind == "tp" else rows.chunk(self.size)[self.rank]

    def mean(self, value: Tensor) -> float:
        """The mean over all processes of a () tensor. Collective."""
        if self.size > 1:
            value = value.detach().clone()
            dist.all_reduce(value)
        return value.item() / self.size

    def any(self, flag: bool) -> bool:
        """Whether it is set in one of them. Collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return self.mean(torch.tensor(float(flag), device=device)) > 0

    def told(self, value: Value) -> Value:
        """The first process's value. Collective."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def leave(self) -> None:
        """When all is done, by all. Collective."""
        if self.kind is not None:
            # DTensor's caches keep gloo's threads alive, and one that frees a tensor of Python's while that ends aborts
            # the process. A barrier has no such tensor, and those of before are free when the last process comes to it.
            dist.barrier()
            dist.destroy_process_group()


ALONE = Team()


def join(kind: str | None) -> Team:
    """This process's team."""
    if kind is None:
        return ALONE
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return Team(kind)


# The tied embedding is whole in each process, and with it the stream from block to block: a head's or a hidden unit's
# way from that stream and back needs one sum of all processes in forward, and one in backward.
SPLIT_ALONG = {"attention.qkv": 0, "attention.out": 1, "mlp.gate_up": 0, "mlp.down": 1}


def _style(layer: nn.Module, name: str) -> ColwiseParallel | RowwiseParallel:
    if isinstance(layer, Float8Linear):
        return Float8RowwiseParallel() if SPLIT_ALONG[name] else Float8ColwiseParallel()
    return RowwiseParallel() if SPLIT_ALONG[name] else ColwiseParallel()


@torch.no_grad()
def _interleave(weight: Tensor, parts: int, size: int) -> None:
    """Orders the rows of stacked matrices so that one cut into `size` equal parts cuts each of them so."""
    weight.copy_(weight.unflatten(0, (parts, size, -1)).transpose(0, 1).flatten(0, 2).clone())


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """`clip_grad_norm_`, also of a model of which a part is split over processes. Collective."""
    by_kind: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    norms = [whole(get_total_norm([p.grad for p in alike if p.grad is not None])) for alike in by_kind.values()]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for alike in by_kind.values():
        clip_grads_with_norm_(alike, largest, total)


def whole(state: Any) -> Any:
    """The tensors of a state, put together from all processes. Collective."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def split_like(state: Any, model: Tensor) -> Any:
    """A tensor of a whole state, or a dict of them, split as `model` is; tensors of other shapes stay. Collective."""
    if isinstance(state, dict):
        return {key: split_like(value, model) for key, value in state.items()}
    if not isinstance(model, DTensor) or not isinstance(state, Tensor) or state.shape != model.shape:
        return state
    return distribute_tensor(state.to(model.device), model.device_mesh, model.placements)
