"""What ranks send each other, traceable: tokens of 2-D tensors; casts as bytes, since gloo sends no float8.

torch.distributed._functional_collectives: the form of collectives that torch.compile traces, DTensor is made of and
async tensor parallelism looks for in a graph (all_gather -> view as float8 -> _scaled_mm). The public in-place ones
trace to a copy more, which that does not match. Delete when they trace alike. Imported where it is called, since not
every torch has torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8_compile.tensor import Operand

Group = Any  # a ProcessGroup, or its name, which a graph can hold


def gather_tokens(x_MF: Tensor, group: Group, blocks: int) -> Tensor:
    """All ranks' tokens of a 2-D tensor. blocks: in how many equal runs of rows the ranks' tokens alternate."""
    import torch.distributed._functional_collectives as functional

    gather = _newer(functional, "all_gather_single", "all_gather_tensor")
    if blocks == 1:
        return _waited_for(gather(x_MF.contiguous(), 0, group))
    x = x_MF.reshape(blocks, -1, x_MF.shape[1])
    return _waited_for(gather(x, 1, group)).view(-1, x_MF.shape[1])


def gather_operand(x8: Operand, group: Group, blocks: int) -> Operand:
    """All ranks' tokens of a cast, sent as bytes; with a scale per row those too."""
    payload = gather_tokens(x8.payload.view(torch.uint8), group, blocks).view(x8.payload.dtype)
    if x8.scale is None or x8.scale.dim() == 0:
        return Operand(payload, x8.scale, x8.unscale)
    scale = gather_tokens(x8.scale, group, blocks)
    return Operand(payload, scale, scale.reciprocal())


def scatter_sum(x_MF: Tensor, group: Group, blocks: int) -> Tensor:
    """This rank's tokens of the ranks' sum: the other way round."""
    import torch.distributed._functional_collectives as functional

    scatter = _newer(functional, "reduce_scatter_single", "reduce_scatter_tensor")
    if blocks == 1:
        return _waited_for(scatter(x_MF.contiguous(), "sum", 0, group))
    x = x_MF.reshape(blocks, -1, x_MF.shape[1])
    return _waited_for(scatter(x, "sum", 1, group)).reshape(-1, x_MF.shape[1])


class GatherTokens(torch.autograd.Function):
    """`gather_tokens`, in high precision; the gradient is summed over the ranks and split."""

    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, group: Group, blocks: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.blocks = group, blocks
        return gather_tokens(x_MF, group, blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return scatter_sum(gradient, ctx.group, ctx.blocks), None, None


def sum_over(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """The ranks' sum."""
    import torch.distributed._functional_collectives as functional

    return _waited_for(functional.all_reduce(x.contiguous(), "sum", group))


def largest_of_all(amax: Tensor, group: Group) -> Tensor:
    """The largest of the ranks' amaxes, in float32. NaN becomes inf, since MAX loses a NaN on some ranks."""
    largest = torch.where(amax.isnan(), torch.inf, amax).float()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return largest


def _newer(functional: Any, name: str, older: str) -> Any:
    """torch 2.13 renamed two of them, and warns of the older names in each call."""
    return getattr(functional, name, None) or getattr(functional, older)


def _waited_for(x: Tensor) -> Tensor:
    """A plain tensor, where eagerly there is one that waits when it is first used."""
    import torch.distributed._functional_collectives as functional

    return x if torch.compiler.is_compiling() else functional.wait_tensor(x)  # type: ignore[no-any-return]
