"""amax -> scale -> saturating cast: the only scale formula in the package.

    amax  = max |x|                                     in x's dtype (the maximum of bf16 values is one of them)
    scale = FP8_MAX / amax                              in float64, stored as float32, at most the largest float32
    cast  = clamp(float32(x) * scale, -MAX, MAX)        then rounded to float8

Pure functions on plain tensors; `cast` puts the result into a `Float8Tensor`, `cast_operand` leaves it in parts. NaN
stays NaN. An amax of 0 gives a finite scale, and so exact zeros. There is no epsilon: one large enough to matter
flushes small gradients to zero. Where the amax is another step's, it is delayed.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8_compile.recipe import FLOAT8_DTYPES, Cast, Granularity
from float8_compile.split import Across, shared_amax
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import (
    at_most,
    foreach_amax,
    guard_or_false,
    is_transformed,
    is_watched,
    saturate,
)

_FLOAT32_EXPONENT = 0x7F800000  # the eight exponent bits of a float32

# On the CPU, whatever the amax is on: a kernel takes it as a number. So no cast makes one, nor a CUDA graph owns it.
_LARGEST = {dtype: torch.tensor(torch.finfo(dtype).max, dtype=torch.float32, device="cpu") for dtype in FLOAT8_DTYPES}


def tensor_amax(x: Tensor, granularity: Granularity = "tensor", axis: int = -1, *, produced: bool = True) -> Tensor:
    """The largest magnitude of x, of x's dtype.

    "tensor": shape (). In a graph reduced row by row, then the rows' maxima: Inductor can fuse the first stage with
    the cast and with whatever produced x, which it can't with one full `max`.
    "row": x's shape with 1 along `axis`, the contracted axis.
    produced: False for what no kernel of the graph produces (a weight): then one full reduction is a kernel less.
    An empty tensor has amax 0.
    """
    if guard_or_false(x.numel() == 0):
        return x.new_zeros(()) if granularity == "tensor" else x.new_zeros(_with_one(x, axis))
    if granularity == "row":
        return x.abs().amax(axis, keepdim=True)
    if not torch.compiler.is_compiling():
        return x.abs().max()  # the same number as `amax`, which takes up to twice the time
    return x.abs().amax(-1).amax() if produced else x.abs().amax()


def batched_amax(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """(len(tensors),) float32 on the device: their largest magnitudes, batched; 0 of an empty one, and of None."""
    held = {number: t for number, t in enumerate(tensors) if t is not None and t.numel()}
    if not held:
        return torch.zeros(len(tensors), device=device)
    largest = dict(zip(held, foreach_amax(list(held.values())), strict=True))
    zero = next(iter(largest.values())).new_zeros(())
    return torch.stack([largest.get(number, zero) for number in range(len(tensors))]).to(device)


def scale_from_amax(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """float32 scale, of amax's shape, that brings amax to the float8 dtype's largest value.

    As if divided in float64: eager and compiled code round 1/float32 differently, but not this one. For the same reason
    a power of two is cut out of the bits (floor), where log2 and exp2 could round up.
    """
    eager = not torch.compiler.is_compiling()
    # A fake or a sharded one takes none but its own kind.
    plain = eager and type(amax) is Tensor and amax.dtype is not torch.float64
    if plain:
        # Two ops less, to the same bits: 53 bits are more than twice 24 and 2, so rounding twice is rounding once
        # (Figueroa, When is double rounding innocuous?, 1995), and no quotient is subnormal.
        quotient = _LARGEST[dtype] / (amax.float() if amax.dim() else amax)
    else:
        # A tensor of amax's rank, so that promotion sees two equals: in a graph this is one constant for all casts
        # and one division each, where `number / amax.double()` is a conversion, a reciprocal and a product.
        quotient = amax.new_full([1] * amax.dim(), torch.finfo(dtype).max, dtype=torch.float64) / amax
    # Asked for here: under dynamic=True Dynamo takes a module's float for an input of the graph.
    scale = at_most(quotient, torch.finfo(torch.float32).max)
    scale = scale if plain else scale.float()
    if power_of_two:
        floor = (scale.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32)
        # Eagerly an op less: NaN's exponent is infinity's, and a minimum with NaN is NaN.
        scale = torch.minimum(scale, floor) if eager else torch.where(scale.isnan(), scale, floor)
    if not eager and amax.dim() == 2 and amax.is_cpu:
        # A scale per row, into memory (see `gemm._one_buffer`): Inductor's C++ would divide again for each element that
        # is scaled, which takes longer than the cast. Triton divides once a row of its block, and fuses otherwise
        # where scales are in memory (benchmarks/LOG.md). Not `stride()`: see there, too.
        scale = scale.as_strided(scale.shape, (scale.shape[1], 1))
    return scale


def saturating_cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, foreign: bool = False, own: bool = False
) -> Tensor:
    """float8 `x * scale`, beyond the range the largest value: a plain conversion gives inf (e5m2) or NaN (e4m3).

    foreign: the scale is not x's own (delayed). An infinity would then saturate, and nobody see that the step has
    overflowed: it becomes NaN, which it does under its own scale, 0.
    own: the scale is that of x's amax, under which nothing is out of range: eagerly an op less.
    """
    if torch.compiler.is_compiling() or is_transformed() or is_watched():
        x = x.float()
        scaled = x * scale
        if foreign:
            # 0, or NaN; a `where` would be so many ops that Inductor stops fusing the producer
            scaled = scaled + (x - x)
        return saturate(scaled, torch.finfo(dtype).max).to(dtype)
    if foreign:
        x = torch.add(x, x, alpha=0)  # 0 times an infinity is NaN
    # The same in place: eagerly each step would be another float32 tensor of x's size.
    scaled = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
    if not own:
        largest = torch.finfo(dtype).max
        scaled.clamp_(-largest, largest)
    return scaled.to(dtype)


def cast(x: Tensor, how: Cast, axis: int = -1) -> Tensor:
    """x as `how` wants it: a `Float8Tensor` of x's shape, or x itself in high precision.

    axis: the contracted axis, which shares a scale under granularity "row". What is a Float8Tensor already
    (cast once for several layers, handed on as a gradient, gathered by FSDP) is taken as it is, unless its
    scale varies along the contracted axis: no GEMM could take that out again. Not differentiable: the gradient
    of a linear's operand is its GEMM's business.
    """
    payload, scale, _ = cast_operand(x, how, axis)
    return payload if scale is None else Float8Tensor(payload, scale, x.dtype)


def cast_operand(x: Tensor, how: Cast, axis: int = -1, across: Across | None = None) -> Operand:
    """`cast`, in parts. across: the ranks that hold parts of x."""
    if isinstance(x, Float8Tensor):
        varies = x.scale.dim() > 0 and not guard_or_false(x.scale.shape[axis] == 1)
        if how.dtype is not None and not varies:
            return Operand(x.payload, x.scale, x.scale.reciprocal())
        x = x.dequantize()
    if how.dtype is None:
        return Operand(x)
    amax = shared_amax(tensor_amax(x, how.granularity, axis), how, axis, across)
    scale = scale_from_amax(amax, how.dtype, how.power_of_two)
    return Operand(saturating_cast(x, scale, how.dtype, own=True), scale, scale.reciprocal())


def _with_one(x: Tensor, axis: int) -> list[int]:
    shape = list(x.shape)
    shape[axis] = 1
    return shape
