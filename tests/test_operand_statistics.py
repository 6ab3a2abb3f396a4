"""What a cast does to an operand, against sums in float64 by numpy, for any shape, magnitude, strides and scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import LARGEST
from torch import Tensor

import float8_compile as f8
from float8_compile.cast import cast_operand, saturating_cast
from float8_compile.operand_statistics import (
    OPERANDS,
    ROWWISE,
    SUMS,
    LayerStatistics,
    OperandStatistics,
    Quality,
    cast_of,
    decibels,
    statistics_of,
)
from float8_compile.recipe import E4M3, E5M2, Cast, Recipe
from float8_compile.tensor import Float8Tensor, Operand

TENSORWISE, ROW = Recipe.from_name("tensorwise"), Recipe.from_name("rowwise")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def seen_of(operand: str, recipe: Recipe, *casts: tuple[Tensor, Operand]) -> OperandStatistics | None:
    """What a layer knows after these casts."""
    statistics = LayerStatistics(torch.device("cpu"))
    for x, cast in casts:
        statistics.add(operand, x, cast, recipe)
    return statistics_of("layer", operand, statistics.vectors[operand], recipe)


def figures(operand: str, recipe: Recipe, *casts: tuple[Tensor, Operand]) -> OperandStatistics:
    found = seen_of(operand, recipe, *casts)
    assert found is not None
    return found


def cast_by(x: Tensor, recipe: Recipe, operand: str) -> tuple[Tensor, Operand]:
    how, gemms = cast_of(operand, recipe)
    return x, cast_operand(x, how, next(iter(gemms.values())))


# The oracle


def by_hand(x: Tensor, payload: Tensor, scale: Tensor, largest: float) -> dict[str, float]:
    """Shares and decibels of a cast without NaN or infinity."""
    exact, got, s = (t.double().numpy() for t in (x, payload.float(), scale))
    nonzero = np.count_nonzero(exact)
    return {
        "amax": float(np.abs(exact).max()),
        "saturated": np.count_nonzero(np.abs(exact * s) > largest * (1 + 2**-23)) / x.numel(),
        "flushed": np.count_nonzero((exact != 0) & (got == 0)) / nonzero if nonzero else 0.0,
        "sqnr": of_energies(float(np.square(exact).sum()), float(np.square(exact - got / s).sum())),
    }


def of_energies(signal: float, noise: float) -> float:
    """NaN stands for None, which approx does not take."""
    return math.nan if signal == 0 else math.inf if noise == 0 else 10 * math.log10(signal / noise)


def comparable(row: OperandStatistics | Quality, *names: str) -> dict[str, float]:
    return {name: math.nan if (value := getattr(row, name)) is None else value for name in names}


@st.composite
def tensors(draw: Any, dtypes: tuple[torch.dtype, ...] = (BF16, FP16, FP32)) -> Tensor:
    """2-D, of any magnitude that the dtype has, with zeros, an outlier, and strides of a transpose or a slice."""
    dtype = draw(st.sampled_from(dtypes))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wanted = draw(st.sampled_from(["rows", "transposed", "sliced"]))
    x = torch.randn((columns, 2 * rows) if wanted == "transposed" else (rows, 2 * columns), generator=generator)
    x = x.double() * 10.0 ** draw(st.integers(-44, 37))
    x[:, 0] *= 10.0 ** draw(st.integers(-8, 8))
    x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = 0
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return {"rows": x[:, :columns], "transposed": x[:, :rows].t(), "sliced": x[:, ::2]}[wanted]


@settings(max_examples=150, deadline=None)
@given(x=tensors(), how=st.sampled_from([E4M3, E5M2]), row=st.booleans(), shift=st.sampled_from([0, 0, -6, 3, 40]))
def test_shares_and_decibels_are_numpys(x: Tensor, how: torch.dtype, row: bool, shift: int) -> None:
    """shift: a scale of another step's, by so many powers of two: numbers saturate, or flush."""
    cast = Cast(how, granularity="row" if row else "tensor")
    recipe = replace(TENSORWISE, output=f8.Gemm(cast, Cast(granularity=cast.granularity)), name="custom")
    assert cast_of("input", recipe)[0] == cast
    scale = cast_operand(x, cast, -1).scale
    assert scale is not None
    scale = (scale.double() * 2.0**shift).clamp(max=torch.finfo(FP32).max).float()
    if not (scale > 0).all():
        return
    payload = saturating_cast(x, scale, how)
    found = figures("input", recipe, (x, Operand(payload, scale)))
    expected = by_hand(x, payload, scale, LARGEST[how])
    # 1e-6 dB and more: of a noise of 1e-17 of the numbers float64 itself keeps less.
    assert comparable(found, *expected) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert (found.calls, found.numbers, found.nonfinite) == (1, x.numel(), 0)
    assert found.scale == (scale.min().item(), scale.max().item())


@settings(max_examples=60, deadline=None)
@given(x=tensors(), operand=st.sampled_from(OPERANDS))
def test_a_cast_by_rows_is_measured_beside_the_one_in_use(x: Tensor, operand: str) -> None:
    """Along each axis that the operand's GEMMs contract; of one that is by rows already it is the cast itself."""
    for recipe in (TENSORWISE, ROW):
        if " for " in operand and recipe is TENSORWISE:
            continue
        found = figures(operand, recipe, cast_by(x, recipe, operand))
        for gemm, axis in cast_of(operand, recipe)[1].items():
            by_row = cast_operand(x, ROWWISE, axis)
            assert by_row.scale is not None
            expected = by_hand(x, by_row.payload, by_row.scale, LARGEST[E4M3])
            wanted = {name: expected[name] for name in ("sqnr", "flushed")}
            assert comparable(found.rowwise[gemm], *wanted) == pytest.approx(wanted, rel=1e-6, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(x=tensors(), power_of_two=st.booleans(), row=st.booleans())
def test_a_dynamic_scale_saturates_nothing(x: Tensor, power_of_two: bool, row: bool) -> None:
    """Its rounding may put the largest number a bit beyond the maximum, which is not counted."""
    cast = Cast(E4M3, granularity="row" if row else "tensor", power_of_two=power_of_two)
    recipe = replace(TENSORWISE, output=f8.Gemm(cast, cast), name="custom")
    assert figures("input", recipe, (x, cast_operand(x, cast))).saturated == 0


def test_such_a_rounding_is_there_to_be_left_out() -> None:
    scaled = [448 / (x := 1 + n / 128) * x for n in range(128)]
    rounded = [torch.tensor(448 / (1 + n / 128)).double().item() * (1 + n / 128) for n in range(128)]
    assert max(scaled) <= 448 * (1 + 2**-52)
    assert any(number > 448 for number in rounded)


# Over several calls


def test_energies_and_counts_add_up_the_amax_is_the_largest_and_the_scale_the_last() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(4, 8) * size for size in (1.0, 100.0, 1e-3)]
    casts = [cast_by(x, TENSORWISE, "input") for x in parts]
    found = figures("input", TENSORWISE, *casts)
    alone = [figures("input", TENSORWISE, cast) for cast in casts]
    noises = [x.double().square().sum() / 10 ** (each.sqnr / 10) for x, each in zip(parts, alone, strict=True)]  # type: ignore[operator]
    signal = sum(x.double().square().sum() for x in parts)
    assert found.sqnr == pytest.approx(10 * math.log10(signal / sum(noises)))
    assert (found.calls, found.numbers) == (3, 96)
    assert found.amax == max(each.amax for each in alone)
    assert found.scale == alone[-1].scale
    assert found.flushed == pytest.approx(sum(each.flushed for each in alone) / 3)


# What is not finite, what is nothing, what is exact

BAD = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])


def with_one_bad(bad: float) -> Tensor:
    x = torch.linspace(0.3, 1, 12).reshape(3, 4)
    x[1, 2] = bad
    return x


@BAD
def test_under_one_scale_an_infinity_takes_all_numbers_with_it(bad: float) -> None:
    found = figures("input", TENSORWISE, cast_by(with_one_bad(bad), TENSORWISE, "input"))
    assert (found.nonfinite, found.numbers, found.amax) == (1, 12, 0)
    assert (found.sqnr, found.saturated, found.flushed, found.scale) == (None, 0, 0, (0, 0))


@BAD
def test_under_a_scale_per_row_it_takes_its_row(bad: float) -> None:
    x = with_one_bad(bad)
    found, rest = (figures("input", ROW, cast_by(t, ROW, "input")) for t in (x, x[[0, 2]]))
    assert found.nonfinite == 4 / 12
    assert replace(found, nonfinite=0, numbers=8) == rest, "and the others are measured as if it were not there"


@BAD
def test_under_a_scale_of_other_steps_it_is_alone(bad: float) -> None:
    x, scale = with_one_bad(bad), torch.tensor(448.0)
    found = figures("input", TENSORWISE, (x, Operand(saturating_cast(x, scale, E4M3, foreign=True), scale)))
    assert found.nonfinite == 1 / 12
    rest = torch.where(x.isfinite(), x, 0.0)
    expected = by_hand(rest, saturating_cast(rest, scale, E4M3), scale, 448)
    assert comparable(found, "sqnr", "amax") == pytest.approx({name: expected[name] for name in ("sqnr", "amax")})
    assert all(quality.sqnr is not None and quality.sqnr > 25 for quality in found.rowwise.values())


def test_a_bad_call_does_not_hide_the_good_ones() -> None:
    good = cast_by(torch.linspace(0.3, 1, 12).reshape(3, 4), TENSORWISE, "input")
    alone, found = (
        figures("input", TENSORWISE, *casts)
        for casts in ([good], [good, cast_by(with_one_bad(math.inf), TENSORWISE, "input")])
    )
    assert found.nonfinite == 1 / 2
    assert (found.sqnr, found.scale, found.rowwise) == (alone.sqnr, alone.scale, alone.rowwise)


def test_zeros_alone_have_no_sqnr_and_nothing_flushed() -> None:
    found = figures("input", TENSORWISE, cast_by(torch.zeros(3, 4), TENSORWISE, "input"))
    assert (found.sqnr, found.flushed, found.saturated, found.nonfinite, found.amax) == (None, 0, 0, 0, 0)


def test_what_float8_holds_is_exact() -> None:
    x = torch.tensor([[1.0, -448.0, 0.5, 0.0]])
    found = figures("input", TENSORWISE, cast_by(x, TENSORWISE, "input"))
    assert found.sqnr == math.inf
    assert found.rowwise["output"].sqnr == math.inf


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(1, 0.01, 20), (1e76, 1e74, 20), (1e-88, 1e-89, 10), (1, 1, 0), (1, 2, -3.0103), (1, 0, math.inf), (0, 0, None)],
)
def test_decibels(signal: float, noise: float, expected: float | None) -> None:
    assert decibels(signal, noise) == (expected if expected is None else pytest.approx(expected, abs=1e-4))


# What adds nothing

CAST = cast_operand(torch.ones(4, 4), Cast())
NOTHING = {
    "high precision": (torch.ones(4, 4), Operand(torch.ones(4, 4))),
    "no cast": (torch.ones(4, 4), None),
    "an empty tensor": (torch.ones(0, 4), cast_operand(torch.ones(0, 4), Cast())),
    "what came in float8": (Float8Tensor(CAST.payload, CAST.scale, FP32), CAST),  # type: ignore[arg-type]
    "on meta": (torch.ones(4, 4, device="meta"), Operand(*(t.to("meta") for t in CAST if t is not None))),
}


@pytest.mark.parametrize("what", NOTHING)
def test_it_adds_nothing(what: str) -> None:
    assert seen_of("input", TENSORWISE, NOTHING[what]) is None  # type: ignore[arg-type]
    assert seen_of("input", TENSORWISE, (torch.ones(4, 4), CAST)), "and of what counts, this would show"


# Operands and GEMMs

ONCE = {
    "input": {"output": -1, "grad_weight": 0},
    "weight": {"output": -1, "grad_input": 0},
    "grad_output": {"grad_input": -1, "grad_weight": 0},
}
TWICE = {
    "input": {"output": -1},
    "input for grad_weight": {"grad_weight": 0},
    "weight": {"output": -1},
    "weight for grad_input": {"grad_input": 0},
    "grad_output": {"grad_input": -1},
    "grad_output for grad_weight": {"grad_weight": 0},
}


@pytest.mark.parametrize(("name", "gemms"), [("tensorwise", ONCE), ("delayed", ONCE), ("rowwise", TWICE)])
def test_each_operand_has_its_cast_and_the_gemms_that_read_it(name: str, gemms: dict[str, dict[str, int]]) -> None:
    recipe = Recipe.from_name(name)
    for operand, expected in gemms.items():
        cast, found = cast_of(operand, recipe)
        assert found == expected
        of_gemm = getattr(recipe, next(iter(found)))
        is_left = operand.startswith("grad_output") or (operand.startswith("input") and "output" in found)
        assert cast == (of_gemm.left if is_left else of_gemm.right)


def test_a_vector_has_a_place_for_each_name() -> None:
    assert {len(vector) for vector in LayerStatistics(torch.device("cpu")).vectors.values()} == {len(SUMS) + 3}
    assert len(set(SUMS)) == len(SUMS)
