"""A weight that tensor parallelism has split over ranks: what they exchange, and which of their scales are one.

    colwise    w is split along N (axis 0), and so is the output; each rank reads the whole input
    rowwise    w is split along K (axis 1), and so is the input; the output is the sum of what the ranks compute

                          forward                           backward
    colwise, tokens split cast x, all-gather                grad_input: reduce-scatter
    colwise               -                                 grad_input: all-reduce
    rowwise, tokens split output: reduce-scatter            cast grad_output, all-gather
    rowwise               output: all-reduce                -

Casts are sent as bytes, which gloo can send and NCCL likes. One logical tensor has one scale: where ranks hold parts of
what shares a scale, its amax is the largest of all ranks', an all-reduce of a number; a delayed scale needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from float8_compile.collectives import largest_of_all, scatter_sum, sum_over
from float8_compile.recipe import Cast


class Across(NamedTuple):
    """The ranks that hold a 2-D tensor together, and the axis along which it is split over them."""

    axis: int
    group: torch.distributed.ProcessGroup


@dataclass(frozen=True)
class Split:
    """A linear layer whose weight (N, K) is split along `axis` over the ranks of `group`.

    tokens: the axis along which the tokens of its input (colwise), its output (rowwise) are split too, or None.
    """

    axis: int
    group: torch.distributed.ProcessGroup
    tokens: int | None = None

    @property
    def gathers_input(self) -> bool:
        """Whether forward gathers the input's tokens, and backward splits its gradient."""
        return self.axis == 0 and self.tokens is not None

    @property
    def gathers_gradient(self) -> bool:
        """Whether forward splits the output's tokens, and backward gathers its gradient."""
        return self.axis == 1 and self.tokens is not None

    def blocks(self, x: Tensor) -> int:
        """In how many equal runs of rows the ranks' tokens alternate, once x (..., F) is 2-D."""
        return 1 if self.tokens is None else math.prod(x.shape[: self.tokens])

    def __deepcopy__(self, memo: object) -> Split:
        return self  # frozen; and a process group can't be copied


def unflattened(rows: Tensor, x: Tensor, tokens: int | None) -> Tensor:
    """A 2-D tensor with the axes of x (..., F); along `tokens`, where that is given, it may be longer or shorter."""
    shape = list(x.shape[:-1])
    if tokens is not None:
        shape[tokens] = -1
    return rows.view(*shape, rows.shape[-1])


def ways_split(split: Split | None) -> tuple[Across | None, Across | None, Across | None]:
    """How what the layer multiplies is split: the input (M, K), its weight (N, K), its output's gradient (M, N).

    Before it is gathered, where only the tokens are.
    """
    if split is None:
        return None, None, None
    weight, columns = Across(split.axis, split.group), Across(1, split.group)
    rows = None if split.tokens is None else Across(0, split.group)
    return (rows, weight, columns) if split.axis == 0 else (columns, weight, rows)


def shared_amax(amax: Tensor, how: Cast, axis: int, across: Across | None) -> Tensor:
    """The amax of the whole logical tensor, of which this rank has a part. Collective where the ranks' parts share it.

    amax: of this rank's part, as `tensor_amax` gives it for `how.granularity` and `axis`.
    """
    if across is None or (how.granularity == "row" and axis % 2 != across.axis):
        return amax
    return largest_of_all(amax, across.group)


class Exchange(NamedTuple):
    """What the ranks of a split layer exchange in this call.

    blocks: see `Split.blocks`. gathers_x: whether the input's tokens are gathered in float8 here, and its gradient is
    split. sums_x_grad: whether the input's gradient is summed here; else who gave the input does it.
    """

    split: Split
    blocks: int
    gathers_x: bool
    sums_x_grad: bool

    @property
    def reads_gathered_x(self) -> bool:
        """Whether a collective has brought the input, here or where it was prepared."""
        return self.split.axis == 0 and (self.gathers_x or not self.sums_x_grad)

    def output(self, y_MN: Tensor) -> Tensor:
        """Of a rowwise layer the ranks' sum, all of it or this rank's tokens."""
        if self.split.axis == 0:
            return y_MN
        if self.split.gathers_gradient:
            return scatter_sum(y_MN, self.split.group, self.blocks)
        return sum_over(y_MN, self.split.group)

    def input_gradient(self, x_grad: Tensor) -> Tensor:
        """Of a colwise layer the ranks' sum, all of it or this rank's tokens."""
        if self.gathers_x:
            return scatter_sum(x_grad, self.split.group, self.blocks)
        return sum_over(x_grad, self.split.group) if self.sums_x_grad else x_grad
