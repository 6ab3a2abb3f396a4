"""Where a parameter's gradient is added up, if not in `.grad`: its part of a flat buffer (flat_gradients.py).

Its own small file, since `Float8Linear` reads the attribute and adds to it in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

ATTRIBUTE = "flat_gradient"  # of a parameter


class GradientSlice:
    """One parameter's gradient in a flat buffer.

    pieces: tensors that hold its rows one after the other, each of some rows and of any shape that these can be viewed
        as: one of the parameter's shape, or several where the ranks' shards lie apart.
    owner: what holds the buffer; lives as long as the parameters that have a part in it.

    A copy or a pickle of a parameter has none, since it has no part in the buffer.
    """

    def __init__(self, pieces: Sequence[Tensor], owner: object) -> None:
        self.pieces, self.owner = tuple(pieces), owner

    def add(self, gradient: Tensor) -> None:
        """`+= gradient`, of the parameter's shape and any dtype."""
        if len(self.pieces) == 1:
            same = gradient.shape == self.pieces[0].shape  # a sparse one can't be reshaped
            self.pieces[0].add_(gradient if same else gradient.reshape(self.pieces[0].shape))
            return
        for piece, part in zip(self.pieces, gradient.flatten().split([p.numel() for p in self.pieces]), strict=True):
            piece.add_(part.view(piece.shape))

    def zero_(self) -> None:
        """`= 0`."""
        for piece in self.pieces:
            piece.zero_()

    def __reduce__(self) -> Any:
        return type(None), ()


def slice_of(parameter: Tensor) -> GradientSlice | None:
    """The parameter's slice, where it has one."""
    return getattr(parameter, ATTRIBUTE, None)
