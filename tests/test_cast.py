"""amax -> scale -> saturating cast: every code of both formats, every magnitude, the same bits in every backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torchao.float8.float8_utils as torchao_utils
from compile_checks import graphs_of, op_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import E4M3, E5M2, FLOAT32_MAX, LARGEST, decode, round_to_float8, scale, sqnr, values
from torch import Tensor

from float8_compile import Cast, Float8Tensor
from float8_compile.cast import cast, saturating_cast, scale_from_amax, tensor_amax

FORMATS = (E4M3, E5M2)
HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
ROW, TENSOR, HIGH = Cast(E4M3, granularity="row"), Cast(E4M3), Cast(dtype=None)
# Half a step of the format, relative to the number (normal numbers) and absolute (below them).
HALF_STEP = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}

every_format = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch.float8_"))
every_precision = pytest.mark.parametrize("precision", HIGH_PRECISION, ids=str)
every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
quick = settings(deadline=None, max_examples=60)


def compiled(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return fn if backend == "eager" else torch.compile(fn, backend=backend, fullgraph=True)


def same(actual: Tensor, expected: Tensor) -> bool:
    """The same bits, where any NaN is as good as another."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    nan = expected.isnan()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.dtype.itemsize]
    bits = [t.contiguous().view(integer).masked_fill(nan, 0) for t in (actual, expected)]
    return torch.equal(actual.isnan(), nan) and torch.equal(*bits)


# The cast


def interesting(dtype: torch.dtype) -> list[float]:
    """Every value of the format, the midpoints between neighbours, their float32 neighbours, and what lies beyond."""
    table = values(dtype)
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(table)]
    beside = [
        torch.nextafter(torch.tensor(m), torch.tensor(direction)).item()
        for m in midpoints
        for direction in (math.inf, -math.inf)
    ]
    largest = LARGEST[dtype]
    beyond = [sign * factor * largest for sign in (1, -1) for factor in (1.001, 1.0625, 1.125, 1.25, 2, 1e30)]
    return [*table, *midpoints, *beside, *beyond, -0.0, math.inf, -math.inf, math.nan]


def rounded(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """float8 by `oracles.round_to_float8` and the code table, with the sign of what was rounded to zero."""
    code = {decode(c, dtype): c for c in range(128) if not math.isnan(decode(c, dtype))}
    nan = next(c for c in range(128) if math.isnan(decode(c, dtype)))

    def encode(x: float) -> int:
        return nan if math.isnan(x) else code[abs(round_to_float8(x, dtype))] | (math.copysign(1, x) < 0) << 7

    return torch.tensor([encode(x) for x in numbers], dtype=torch.uint8).view(dtype)


@every_format
def test_the_oracle_knows_all_256_codes(dtype: torch.dtype) -> None:
    decoded = torch.tensor([decode(code, dtype) for code in range(256)])
    assert same(torch.arange(256, dtype=torch.uint8).view(dtype).float(), decoded)
    assert max(values(dtype)) == LARGEST[dtype] == torch.finfo(dtype).max
    assert len(values(dtype)) == {E4M3: 253, E5M2: 247}[dtype]


@every_backend
def test_it_rounds_to_the_nearest_value_ties_to_even_and_saturates(backend: str) -> None:
    def cast_both(e4m3: Tensor, e5m2: Tensor, one: Tensor) -> list[Tensor]:
        return [saturating_cast(e4m3, one, E4M3), saturating_cast(e5m2, one, E5M2)]

    numbers = [interesting(dtype) for dtype in FORMATS]
    results = compiled(cast_both, backend)(*map(torch.tensor, numbers), torch.tensor(1.0))
    for dtype, given_numbers, result in zip(FORMATS, numbers, results, strict=True):
        assert same(result, rounded(given_numbers, dtype))


@every_format
@pytest.mark.parametrize(
    ("x", "becomes"),
    [(1e6, "largest"), (math.inf, "largest"), (-1e6, "-largest"), (-math.inf, "-largest"), (math.nan, "nan")],
)
def test_beyond_the_range_is_the_largest_value_and_nan_stays_nan(dtype: torch.dtype, x: float, becomes: str) -> None:
    expected = {"largest": LARGEST[dtype], "-largest": -LARGEST[dtype], "nan": math.nan}[becomes]
    result = saturating_cast(torch.tensor([x]), torch.tensor(1.0), dtype).float()
    assert same(result, torch.tensor([expected]))


@every_format
@every_precision
@given(exponent=st.integers(-8, 8))
@quick
def test_a_scaled_value_of_the_format_survives_the_round_trip(
    dtype: torch.dtype, precision: torch.dtype, exponent: int
) -> None:
    two_n = 2.0**exponent
    table = torch.tensor(values(dtype), dtype=torch.float64)
    x = table.div(two_n).to(precision)
    exact = x.double() * two_n == table  # float16 overflows, and is too coarse for some of e5m2's subnormals
    assert exact.sum() > 150
    payload = saturating_cast(x, torch.tensor(two_n), dtype)
    assert torch.equal(Float8Tensor(payload, torch.tensor(two_n), precision).dequantize()[exact], x[exact])


@every_format
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(-60, 60))
@quick
def test_any_number_is_rounded_as_the_oracle_does(dtype: torch.dtype, numbers: list[float], exponent: int) -> None:
    scaled = (torch.tensor(numbers) * 2.0**exponent).tolist()
    result = saturating_cast(torch.tensor(numbers), torch.tensor(2.0**exponent), dtype)
    assert same(result, rounded(scaled, dtype))


# amax


@st.composite
def tensors(draw: st.DrawFn, smallest: int = 1) -> Tensor:
    """Of any high precision, 1 to 4 axes, and any strides: whole, sliced, transposed or expanded."""
    shape = draw(st.lists(st.integers(smallest, 5), min_size=1, max_size=4))
    magnitude = draw(st.sampled_from([1e-30, 1e-4, 1.0, 1e4]))
    torch.manual_seed(draw(st.integers(0, 99)))
    x = (torch.randn([2 * n for n in shape]) * magnitude).to(draw(st.sampled_from(HIGH_PRECISION)))
    x = x[tuple(slice(draw(st.integers(0, n)), None, draw(st.sampled_from([1, 2]))) for n in shape)]
    if draw(st.booleans()):
        x = x.transpose(0, -1)
    return x[:1].expand(3, *x.shape[1:]) if draw(st.booleans()) else x


def amax_by_hand(x: Tensor) -> float:
    return max((abs(number) for number in x.flatten().tolist()), default=0.0)


@given(tensors())
@quick
def test_amax_is_the_largest_magnitude_exactly(x: Tensor) -> None:
    amax = tensor_amax(x)
    assert (amax.shape, amax.dtype) == ((), x.dtype)
    assert amax.item() == amax_by_hand(x)


@pytest.mark.parametrize("axis", [0, -1])
@given(x=tensors())
@quick
def test_a_rows_amax_is_its_largest_magnitude_exactly(axis: int, x: Tensor) -> None:
    amax = tensor_amax(x, "row", axis)
    shape = list(x.shape)
    shape[axis] = 1
    assert (list(amax.shape), amax.dtype) == (shape, x.dtype)
    rows = x.movedim(axis, -1).reshape(-1, x.shape[axis])
    assert amax.flatten().tolist() == [amax_by_hand(row) for row in rows]


def test_a_number_is_its_own_amax() -> None:
    assert tensor_amax(torch.tensor(-3.0)).item() == 3


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3), (0, 2, 3), (2, 3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("granularity", "axis"), [("tensor", -1), ("row", 0), ("row", -1)])
@every_precision
def test_of_an_empty_tensor_it_is_zero(shape: tuple[int, ...], granularity: Any, axis: int, precision: Any) -> None:
    amax = tensor_amax(torch.empty(shape, dtype=precision), granularity, axis)
    expected = list(shape)
    expected[axis] = 1
    assert list(amax.shape) == ([] if granularity == "tensor" else expected)
    assert amax.dtype == precision
    assert not amax.any()
    assert cast(torch.empty(shape, dtype=precision), Cast(E4M3, granularity=granularity), axis).shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_precision
def test_nan_and_inf_reach_the_amax_from_any_place(bad: float, precision: torch.dtype) -> None:
    for place in range(12):
        x = torch.ones(3, 4, dtype=precision)
        x.view(-1)[place] = bad
        assert same(tensor_amax(x), torch.tensor(abs(bad), dtype=precision))
        for axis, hit in ((0, place % 4), (-1, place // 4)):
            expected = torch.ones(12 // x.shape[axis], dtype=precision)
            expected[hit] = abs(bad)
            assert same(tensor_amax(x, "row", axis).flatten(), expected)


@pytest.mark.parametrize(("granularity", "stages"), [("tensor", 2), ("row", 1)])
def test_what_is_traced_is_a_reduction_in_two_stages(granularity: Any, stages: int) -> None:
    """Row by row, then over the rows: the form of which Inductor fuses the first stage with the cast."""
    graphs = graphs_of(lambda f: f(torch.randn(4, 8)), lambda x: tensor_amax(x, granularity))
    counts = op_counts(graphs.forward)
    assert counts["aten.amax.default"] == stages
    assert counts.keys() == {"aten.abs.default", "aten.amax.default"}


def test_a_full_reduction_would_be_seen() -> None:
    graphs = graphs_of(lambda f: f(torch.randn(4, 8)), lambda x: x.abs().max())
    assert op_counts(graphs.forward)["aten.amax.default"] != 2


# The scale

AMAXES = {
    "zero": 0.0,
    "the smallest subnormal": 2.0**-149,
    "subnormal": 1e-40,
    "tiny": 1e-30,
    "small": 1e-12,
    "normal": 0.7,
    "large": 1e30,
    "the largest": FLOAT32_MAX,
    "inf": math.inf,
    "nan": math.nan,
}


@every_format
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", AMAXES.values(), ids=AMAXES)
def test_the_scale_brings_amax_to_the_largest_value(dtype: torch.dtype, power_of_two: bool, amax: float) -> None:
    for shape in ((), (1, 1), (3, 1)):
        result = scale_from_amax(torch.full(shape, amax), dtype, power_of_two)
        exact = torch.tensor(amax).item()  # as float32
        assert same(result, torch.full(shape, scale(exact, dtype, power_of_two)))


@every_format
@given(amax=st.floats(2.0**-149, FLOAT32_MAX, width=32))
@quick
def test_the_scale_is_within_half_a_float32_step_of_the_quotient(dtype: torch.dtype, amax: float) -> None:
    result = scale_from_amax(torch.tensor(amax), dtype)
    exact = Fraction(LARGEST[dtype]) / Fraction(amax)
    if exact > FLOAT32_MAX:
        assert result == FLOAT32_MAX
    else:
        assert abs(Fraction(result.item()) - exact) <= exact * Fraction(1, 2**24) * (1 + Fraction(1, 2**20))


@every_format
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float32])
def test_the_eager_scale_is_as_if_divided_in_float64(dtype: torch.dtype, precision: torch.dtype) -> None:
    if precision is torch.float32:
        bits = torch.randint(0, 0x7F800001, (1_000_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    else:  # every one of them, NaN too
        bits = torch.arange(0, 2**15, dtype=torch.int16)
    amaxes = bits.view(precision)
    quotients = torch.full((1,), LARGEST[dtype], dtype=torch.float64) / amaxes
    assert same(scale_from_amax(amaxes, dtype), quotients.clamp(max=FLOAT32_MAX).float())


@every_format
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@given(exponent=st.integers(-150, 127), bad=st.sampled_from([0.0, math.inf, math.nan]), power_of_two=st.booleans())
@quick
def test_under_its_own_scale_nothing_is_left_to_saturate(
    dtype: torch.dtype, granularity: Any, exponent: int, bad: float, power_of_two: bool
) -> None:
    for precision in HIGH_PRECISION:
        x = (torch.randn(5, 7, dtype=torch.float64) * 2.0**exponent).to(precision)
        x[0, 0] = bad
        t = cast(x, Cast(dtype, granularity=granularity, power_of_two=power_of_two))
        assert same(t.payload, saturating_cast(x, t.scale, dtype))


@every_format
@given(exponent=st.integers(-100, 100), steps=st.integers(-3, 3))
@quick
def test_a_power_of_two_is_a_floor_also_one_step_below_one(dtype: torch.dtype, exponent: int, steps: int) -> None:
    bits = torch.tensor(LARGEST[dtype] * 2.0**-exponent).view(torch.int32) + steps
    amax = bits.view(torch.float32)  # the quotient is 2**exponent, or just beside it
    result = scale_from_amax(amax, dtype, power_of_two=True)
    assert result == 2.0 ** (exponent if steps <= 0 else exponent - 1)
    assert Fraction(result.item()) <= Fraction(LARGEST[dtype]) / Fraction(amax.item()) < 2 * Fraction(result.item())


def all_scales(*amaxes: Tensor) -> list[Tensor]:
    return [scale_from_amax(a, dtype, two_n) for a in amaxes for dtype in FORMATS for two_n in (False, True)]


@every_backend
def test_1000_random_amaxes_have_the_same_scale_in_every_backend(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F80, (1000,), generator=generator, dtype=torch.int16)  # any magnitude, also subnormal
    bits[:3] = torch.tensor([0, 0x7F80, 0x7FC0], dtype=torch.int16)  # zero, inf, NaN
    amaxes = bits.view(torch.bfloat16)
    run = compiled(all_scales, backend)
    column, *numbers = amaxes[:, None], *amaxes.unbind()
    by_number = [run(column, number) for number in numbers]
    in_a_column = by_number[0][:4]
    for which, (dtype, two_n) in enumerate((d, two_n) for d in FORMATS for two_n in (False, True)):
        expected = torch.tensor([scale(amax, dtype, two_n) for amax in amaxes.tolist()])
        assert same(in_a_column[which], expected[:, None])
        assert same(torch.stack([scales[4 + which] for scales in by_number]), expected)


@every_format
@pytest.mark.parametrize("power_of_two", [False, True])
@given(amax=st.floats(2.0**-39, FLOAT32_MAX, width=32), precision=st.sampled_from(HIGH_PRECISION))
@quick
def test_torchao_has_the_same_scale_where_its_epsilon_does_not_matter(
    dtype: torch.dtype, power_of_two: bool, amax: float, precision: torch.dtype
) -> None:
    a = torch.tensor(amax).to(precision)
    if 1e-12 <= a.item() < math.inf:
        theirs = torchao_utils.amax_to_scale(a, dtype, round_scales_to_power_of_2=power_of_two)
        assert same(scale_from_amax(a, dtype, power_of_two), theirs)


@every_format
@given(x=tensors())
@quick
def test_torchao_has_the_same_scale_of_a_tensor(dtype: torch.dtype, x: Tensor) -> None:
    if tensor_amax(x).item() >= 1e-12:
        assert same(scale_from_amax(tensor_amax(x), dtype), torchao_utils.tensor_to_scale(x, dtype))


def test_where_torchaos_epsilon_matters_small_gradients_are_kept() -> None:
    x = torch.randn(8, 8) * 1e-30
    assert not saturating_cast(x, torchao_utils.tensor_to_scale(x, E5M2), E5M2).float().any()
    assert sqnr(x, cast(x, Cast(E5M2)).dequantize()) > 15


# Both together


@every_format
@pytest.mark.parametrize("how", ["tensor", "row", "tensor 2^n", "row 2^n"])
@pytest.mark.parametrize("magnitude", [1e-8, 1e-20, 1e-30, 1e-38, 1e-42, 2.0**-149, 1e30, FLOAT32_MAX])
def test_at_every_magnitude_the_error_is_float8s(dtype: torch.dtype, how: str, magnitude: float) -> None:
    """Down to 1e-30 relative to each number; below, where the scale is capped, half a step of the smallest ones."""
    relative, absolute = HALF_STEP[dtype]
    unit = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
    for precision in HIGH_PRECISION:
        info = torch.finfo(precision)
        x = (unit * min(magnitude, info.max)).to(precision)
        t = cast(x, Cast(dtype, granularity=how.split()[0], power_of_two=how.endswith("2^n")))
        back = t.dequantize().double()
        assert t.scale.isfinite().all()
        assert back.isfinite().all()
        rounding = info.eps * x.double().abs() + info.smallest_normal * info.eps  # of dequantizing to this precision
        bound = torch.maximum(relative * x.double().abs(), absolute / t.scale.double())
        assert ((back - x.double()).abs() <= bound + rounding).all()
        if magnitude >= 1e-30 and x.any() and precision is not torch.float16:
            assert sqnr(x, back) > {E4M3: 28, E5M2: 22}[dtype]


@every_format
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_are_exact_zeros(dtype: torch.dtype, granularity: Any, power_of_two: bool) -> None:
    t = cast(torch.zeros(4, 8), Cast(dtype, granularity=granularity, power_of_two=power_of_two))
    assert t.scale.isfinite().all()
    assert torch.equal(t.dequantize(), torch.zeros(4, 8))
    assert torch.equal(0 * t.scale.reciprocal(), torch.zeros_like(t.scale)), "a GEMM multiplies by this"


def test_a_zero_row_leaves_the_others_as_they_are() -> None:
    x = torch.randn(3, 8)
    x[1] = 0
    t = cast(x, ROW)
    assert not t.dequantize()[1].any()
    assert torch.equal(t.dequantize()[[0, 2]], cast(x[[0, 2]], ROW).dequantize())


@every_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen_afterwards(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = bad
    assert cast(x, Cast(dtype)).dequantize()[1, 2].isnan()
    by_row = cast(x, Cast(dtype, granularity="row")).dequantize()
    assert by_row[1, 2].isnan()
    assert torch.equal(by_row[[0, 2]], x[[0, 2]]), "and only its row suffers"


@given(tensors(), st.sampled_from([0, -1]), st.sampled_from([TENSOR, ROW, Cast(E5M2, granularity="row")]))
@quick
def test_strides_do_not_matter(x: Tensor, axis: int, how: Cast) -> None:
    strided, packed = cast(x, how, axis), cast(x.contiguous(), how, axis)
    assert same(strided.payload, packed.payload)
    assert same(strided.scale, packed.scale)


@every_backend
def test_every_backend_casts_to_the_same_bits(backend: str) -> None:
    recipes = [Cast(dtype, granularity=g, power_of_two=two_n) for dtype, g, two_n in
               [(E4M3, "tensor", False), (E5M2, "tensor", False), (E4M3, "row", True)]]  # fmt: skip

    def parts(x: Tensor) -> list[Tensor]:
        casts = [cast(x, how, axis) for how in recipes for axis in (0, -1)]
        return [part for t in casts for part in (t.payload, t.scale)]

    x = torch.randn(33, 65, generator=torch.Generator().manual_seed(0)).bfloat16()
    for actual, expected in zip(compiled(parts, backend)(x), parts(x), strict=True):
        assert same(actual, expected)


# What `cast` takes as it is


def test_high_precision_passes_through() -> None:
    x = torch.randn(4, 8)
    assert cast(x, HIGH) is x


def test_the_result_says_what_it_was() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    for how, axis, scale_shape in ((TENSOR, -1, ()), (ROW, -1, (4, 1)), (ROW, 0, (1, 8))):
        t = cast(x, how, axis)
        assert isinstance(t, Float8Tensor)
        assert (t.shape, t.dtype, t.payload.dtype, t.scale.shape) == (x.shape, x.dtype, E4M3, scale_shape)
        assert t.scale.dtype is torch.float32


@pytest.mark.parametrize(
    ("made_by", "made_along", "wanted", "wanted_along"),
    [
        (TENSOR, -1, TENSOR, -1),
        (TENSOR, -1, ROW, 0),  # one scale comes out of any GEMM
        (TENSOR, -1, Cast(E5M2), 0),
        (ROW, -1, ROW, -1),
        (ROW, 0, ROW, 0),
        (ROW, -1, TENSOR, -1),
    ],
)
def test_what_is_float8_already_is_taken_as_it_is(
    made_by: Cast, made_along: int, wanted: Cast, wanted_along: int
) -> None:
    t = cast(torch.randn(4, 8), made_by, made_along)
    again = cast(t, wanted, wanted_along)
    assert again.payload is t.payload
    assert again.scale is t.scale


@pytest.mark.parametrize("wanted", [ROW, TENSOR])
@pytest.mark.parametrize(("made_along", "wanted_along"), [(-1, 0), (0, -1)])
def test_a_scale_that_varies_along_the_contracted_axis_is_cast_again(
    wanted: Cast, made_along: int, wanted_along: int
) -> None:
    t = cast(torch.randn(4, 8), ROW, made_along)
    again, expected = cast(t, wanted, wanted_along), cast(t.dequantize(), wanted, wanted_along)
    assert same(again.payload, expected.payload)
    assert same(again.scale, expected.scale)


def test_where_high_precision_is_wanted_it_is_dequantized() -> None:
    t = cast(torch.randn(4, 8), TENSOR)
    assert same(cast(t, HIGH), t.dequantize())
