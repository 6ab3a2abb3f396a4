"""What the right answer is, by other means than the package's: value sets, float64 products, Python arithmetic."""

from __future__ import annotations

import bisect
import functools
import math

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FLOAT32_MAX = torch.finfo(torch.float32).max


def decode(code: int, dtype: torch.dtype) -> float:
    """The value of one of the 256 codes, from the definition of the format (arXiv 2209.05433)."""
    mantissa_bits = 3 if dtype is E4M3 else 2
    bias = 7 if dtype is E4M3 else 15
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if dtype is E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if dtype is E5M2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


@functools.cache
def values(dtype: torch.dtype) -> list[float]:
    """Every finite value of the format, ascending, zero once."""
    return sorted({decode(code, dtype) for code in range(256) if math.isfinite(decode(code, dtype))})


def round_to_float8(x: float, dtype: torch.dtype) -> float:
    """Saturating, to the nearest value, ties to the even code; NaN stays NaN."""
    if math.isnan(x):
        return x
    table = values(dtype)
    x = min(max(x, table[0]), table[-1])
    above = bisect.bisect_left(table, x)
    if table[above] == x:
        return x
    low, high = table[above - 1], table[above]
    if x - low != high - x:
        return low if x - low < high - x else high
    # Neighbours have codes one apart, so exactly one of them is even.
    code = abs(table.index(low) - table.index(0.0))
    return low if code % 2 == 0 else high


def scale(amax: float, dtype: torch.dtype, power_of_two: bool = False) -> float:
    """FP8_MAX / amax in Python's float64, as float32, capped; a power of two by `frexp`."""
    if math.isnan(amax):
        return math.nan
    quotient = math.inf if amax == 0 else LARGEST[dtype] / amax
    rounded = torch.tensor(min(quotient, FLOAT32_MAX), dtype=torch.float64).float().item()
    if not power_of_two or rounded == 0:
        return rounded
    return math.ldexp(1.0, math.frexp(rounded)[1] - 1)


def delayed_update(
    history: list[float],
    scale_before: float,
    amax: float,
    dtype: torch.dtype,
    *,
    margin: int = 0,
    rule: str = "max",
    power_of_two: bool = False,
) -> tuple[list[float], float]:
    """History, the newest first, and scale after a step with this amax: FP8_MAX / A / 2**margin, in Python's float64.

    A is the largest of the history and the step's amax, or under "most_recent" the step's. A step whose amax is 0 or
    not finite leaves both as they are.
    """
    if not (math.isfinite(amax) and amax > 0):
        return history, scale_before
    largest = max(*history, amax) if rule == "max" else amax
    return [amax, *history][: len(history)], scale(largest * 2.0**margin, dtype, power_of_two)


def linear_float64(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """output, grad_input and grad_weight of a linear layer without bias, in float64."""
    x, w, g = x.double(), w.double(), g.double()
    return x @ w.t(), g @ w, g.t() @ x


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantisation noise, in dB."""
    noise = (reference.double() - approximation.double()).norm()
    return (20 * torch.log10(reference.double().norm() / noise)).item()
