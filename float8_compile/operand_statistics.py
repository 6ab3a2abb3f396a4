"""What a cast does to an operand, in sums that a layer keeps while it is monitored (monitor.py).

    scaled  = x * scale                      error = (scaled - payload) / scale
    SQNR    = 10 log10(sum x^2 / sum error^2)    in dB, sums over all calls

Computed and summed in float64, whose range holds the square of each float32, so no sum under- or overflows. All of it
is tensors that are added to in place, in the graph when compiled: no number is read before the user asks.

Beside the cast in use stands `ROWWISE`, the finest that a recipe can ask for, of the same numbers along each axis that
the operand's GEMMs contract: whether another recipe would help is so measured, not guessed.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8_compile.cast import cast_operand
from float8_compile.recipe import E4M3, Cast, Recipe
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import (
    guard_or_false,
    local_part,
    mark_static_address,
    transforms_are_active,
    without_modes,
)

# By tensor, then what is cast once more for its other GEMM, where the recipe wants another cast there.
OPERANDS = (
    "input",
    "weight",
    "grad_output",
    "input for grad_weight",
    "weight for grad_input",
    "grad_output for grad_weight",
)
ROWWISE = Cast(E4M3, granularity="row", power_of_two=True)

# A vector: sums, then the largest magnitude, then the scales of the last call.
SUMS = (
    "calls",
    "finite",
    "nonfinite",
    "nonzero",
    "saturated",
    "flushed",
    "signal",
    "noise",
    "rowwise_flushed",
    "rowwise_noise",
    "other_rowwise_flushed",
    "other_rowwise_noise",
)
# Of a dynamic scale the largest number may lie beyond the float8 maximum by the scale's own rounding.
_BEYOND = 1 + torch.finfo(torch.float32).eps


def cast_of(operand: str, recipe: Recipe) -> tuple[Cast, dict[str, int]]:
    """How a recipe casts one of `OPERANDS`, and the GEMMs that read this cast, with the axis that each contracts."""
    first: tuple[str, Cast]
    other: tuple[str, Cast]
    first, other, once = {
        "input": (("output", recipe.output.left), ("grad_weight", recipe.grad_weight.right), recipe.casts_input_once),
        "weight": (("output", recipe.output.right), ("grad_input", recipe.grad_input.right), recipe.casts_weight_once),
        "grad_output": (
            ("grad_input", recipe.grad_input.left),
            ("grad_weight", recipe.grad_weight.left),
            recipe.casts_gradient_once,
        ),
    }[operand.split(" ")[0]]
    if " for " in operand:
        return other[1], {other[0]: 0}
    return first[1], {first[0]: -1, other[0]: 0} if once else {first[0]: -1}


class LayerStatistics:
    """Of each of a layer's operands a vector of float64, which calls add to. It is no state: a copy of a layer, in
    memory or in a file, has None in its place."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # else only inference could write to them
            self.vectors = {
                operand: mark_static_address(torch.zeros(len(SUMS) + 3, dtype=torch.float64, device=device))
                for operand in OPERANDS
            }

    @torch.no_grad()
    def add(self, operand: str, x: Tensor, cast: Operand | None, recipe: Recipe) -> None:
        """Add what `cast` made of x, a 2-D tensor in high precision, for one of `OPERANDS`.

        Nothing is added for what stays in high precision, for what came here in float8 (gathered, or cast before the
        layer) or as a DTensor, for an empty tensor, and under torch.func's transforms, which allow no such write.
        """
        if cast is None or cast.scale is None or isinstance(x, Float8Tensor) or transforms_are_active():
            return
        if x.is_meta or local_part(x) is not None or guard_or_false(x.numel() == 0):
            return
        # Eagerly a selective checkpoint would count these ops, and after the block give theirs for the model's.
        with nullcontext() if torch.compiler.is_compiling() else without_modes():
            vector = self.vectors[operand]
            vector.copy_(_added(vector.to(x.device), x, cast.payload, cast.scale, *cast_of(operand, recipe)))

    def __reduce__(self) -> Any:
        return type(None), ()


def _added(vector: Tensor, x: Tensor, payload: Tensor, scale: Tensor, how: Cast, gemms: dict[str, int]) -> Tensor:
    """The vector after this cast: payload = saturate(x * scale)."""
    scaled, payload = x.double() * scale, payload.float()
    error = (scaled - payload) / scale
    finite = error.isfinite()
    x = torch.where(finite, x, 0.0)
    nonzero, exact = x != 0, x.double()
    saturated = finite & (scaled.abs() > torch.finfo(how.dtype or E4M3).max * _BEYOND)
    sums = [
        *(finite, ~finite, nonzero, saturated, nonzero & (payload == 0)),
        *(exact.square(), torch.where(finite, error, 0.0).square()),
    ]
    for axis in gemms.values() if how != ROWWISE else ():
        by_row = cast_operand(x, ROWWISE, axis)
        assert by_row.scale is not None
        fine = by_row.payload.float()
        sums += [nonzero & (fine == 0), (exact - fine / by_row.scale.double()).square()]
    new = [vector.new_ones(()), *(term.sum(dtype=torch.float64) for term in sums)]
    new += [vector.new_zeros(())] * (len(SUMS) - len(new))
    usable = scale.isfinite() & (scale > 0)
    smallest = torch.where(usable, scale, math.inf).amin().double()
    largest = torch.where(usable, scale, 0.0).amax().double()
    last = torch.where(largest > 0, torch.stack([smallest, largest]), vector[-2:])
    amax = torch.maximum(vector[-3], exact.abs().amax())
    return torch.cat([vector[: len(SUMS)] + torch.stack(new), amax.unsqueeze(0), last])


class Quality(NamedTuple):
    """How good a cast is: `sqnr` and `flushed` as in `OperandStatistics`."""

    sqnr: float | None
    flushed: float


@dataclass(frozen=True)
class OperandStatistics:
    """What was seen of one operand of one layer, over all its calls.

    layer: the layer's name in the module that was monitored. operand: one of `OPERANDS`. cast: how it is cast.
    calls: how many casts were seen. numbers: how many numbers they had.
    amax: the largest finite magnitude.
    scale: the smallest and the largest of the last call's scales, the same where the tensor has one.
    saturated: the share of numbers with |x * scale| beyond the float8 maximum, by more than the rounding of the scale.
    flushed: the share of the numbers other than zero that became zero.
    nonfinite: the share of numbers that the GEMM read as infinite or NaN: they were, or an amax that they share was.
        They are left out of all other figures.
    sqnr: signal to quantisation noise in dB, `decibels` of sum x^2 and sum (x - payload / scale)^2.
    rowwise: for each GEMM that reads this cast, by name, what `ROWWISE` would have made of the same numbers.
    """

    layer: str
    operand: str
    cast: Cast
    calls: int
    numbers: int
    amax: float
    scale: tuple[float, float]
    saturated: float
    flushed: float
    nonfinite: float
    sqnr: float | None
    rowwise: dict[str, Quality]


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); infinity where nothing was lost, None where there was no signal."""
    if signal == 0:
        return None
    return 10 * (math.log10(signal) - math.log10(noise)) if noise > 0 else math.inf


def statistics_of(layer: str, operand: str, vector: Tensor, recipe: Recipe) -> OperandStatistics | None:
    """The figures of a vector of `LayerStatistics`, None where no call added to it. Waits for the device."""
    *numbers, amax, smallest, largest = vector.tolist()
    seen = dict(zip(SUMS, numbers, strict=True))
    if not seen["calls"]:
        return None
    cast, gemms = cast_of(operand, recipe)
    signal, nonzero = seen["signal"], seen["nonzero"]
    sums_of = zip(gemms, ("", "") if cast == ROWWISE else ("rowwise_", "other_rowwise_"), strict=False)
    return OperandStatistics(
        layer,
        operand,
        cast,
        calls=int(seen["calls"]),
        numbers=int(seen["finite"] + seen["nonfinite"]),
        amax=amax,
        scale=(smallest, largest),
        saturated=_share(seen["saturated"], seen["finite"]),
        flushed=_share(seen["flushed"], nonzero),
        nonfinite=_share(seen["nonfinite"], seen["finite"] + seen["nonfinite"]),
        sqnr=decibels(signal, seen["noise"]),
        rowwise={
            gemm: Quality(decibels(signal, seen[f"{name}noise"]), _share(seen[f"{name}flushed"], nonzero))
            for gemm, name in sums_of
        },
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
