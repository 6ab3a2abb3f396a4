"""The three GEMMs against float64: to the bit where float8 holds the numbers, by signal to noise where it can't.

M tokens, K in_features, N out_features, as in gemm.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torchao.float8
from compile_checks import compile_counted
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import E4M3, E5M2, linear_float64, sqnr
from torch import Tensor, nn

from float8_compile import Cast, Float8Linear, Float8Tensor, Recipe, gemm
from float8_compile.cast import cast

Granularity = Literal["tensor", "row"]
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIXTURES: list[tuple[Granularity, Granularity]] = [
    ("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("tensor", "row"),
]  # fmt: skip

# name: the GEMM, its operands (each by the axis that it contracts), which of `linear_float64` it is
GEMMS: dict[str, tuple[Callable[..., Tensor], tuple[str, int], tuple[str, int], int]] = {
    "output": (gemm.output, ("x", -1), ("w", -1), 0),
    "grad_input": (gemm.grad_input, ("g", -1), ("w", 0), 1),
    "grad_weight": (gemm.grad_weight, ("g", 0), ("x", 0), 2),
}
every_gemm = pytest.mark.parametrize("name", GEMMS)
every_mixture = pytest.mark.parametrize(("left", "right"), MIXTURES)
every_dtype = pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
every_recipe = pytest.mark.parametrize("recipe", Recipe.names())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shapes(m: int, k: int, n: int) -> dict[str, tuple[int, int]]:
    return {"x": (m, k), "w": (n, k), "g": (m, n)}


def exact(shape: tuple[int, int], granularity: Granularity, axis: int, dtype: torch.dtype = E4M3) -> Float8Tensor:
    """Integers up to 4 over powers of two: float8 holds them, float32 their sums of products."""
    payload = torch.randint(-4, 5, shape).float().to(dtype)
    scale_shape = list(shape)
    scale_shape[axis] = 1
    exponents = torch.randint(-2, 3, () if granularity == "tensor" else scale_shape)
    return Float8Tensor(payload, 2.0**exponents, torch.float32)


def operands(name: str, sizes: tuple[int, int, int], make: Callable[[str, tuple[int, int], int], Tensor]) -> Any:
    """The GEMM, its two operands, and the index of its result."""
    function, *wanted, which = GEMMS[name]
    left, right = (make(tensor, shapes(*sizes)[tensor], axis) for tensor, axis in wanted)
    return function, left, right, which


def exact_operands(name: str, sizes: tuple[int, int, int], left: Granularity, right: Granularity) -> Any:
    granularity = dict(zip((GEMMS[name][1], GEMMS[name][2]), (left, right), strict=True))
    return operands(
        name,
        sizes,
        lambda tensor, shape, axis: exact(shape, granularity[tensor, axis], axis, E5M2 if tensor == "g" else E4M3),
    )


def float64(name: str, left: Tensor, right: Tensor) -> Tensor:
    """What the GEMM should give for these operands, in float64."""
    left, right = (t.payload.double() / t.scale if isinstance(t, Float8Tensor) else t.double() for t in (left, right))
    zero = torch.zeros
    (m_or_n, _), (_, k) = left.shape, right.shape
    if name == "output":
        return linear_float64(left, right, zero(m_or_n, right.shape[0]))[0]
    if name == "grad_input":
        return linear_float64(zero(m_or_n, k), right, left)[1]
    return linear_float64(right, zero(left.shape[1], k), left)[2]


# Exact where it can be


@every_gemm
@every_mixture
def test_what_float8_holds_is_multiplied_exactly(name: str, left: Granularity, right: Granularity) -> None:
    """All granularities, dtypes, accumulations and the emulation: float64's result, rounded once."""
    function, a, b, _ = exact_operands(name, (32, 48, 16), left, right)
    reference = float64(name, a, b)
    for dtype, fast_accum, emulate in itertools.product(OUT_DTYPES, (False, True), (False, True)):
        result = function(a, b, dtype, fast_accum=fast_accum, emulate=emulate)
        assert result.dtype is dtype
        assert torch.equal(result, reference.to(dtype)), (dtype, fast_accum, emulate)


@every_gemm
@every_mixture
@given(
    m=st.sampled_from([1, 5, 17, 32]),
    k=st.sampled_from([1, 3, 8, 10, 16, 33]),
    n=st.sampled_from([1, 7, 8, 10, 16, 31]),
    dtype=st.sampled_from(OUT_DTYPES),
    emulate=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_size_equals_the_unpadded_reference(
    name: str, left: Granularity, right: Granularity, m: int, k: int, n: int, dtype: torch.dtype, emulate: bool
) -> None:
    """Scenario 10. fast_accum=True takes the kernel with scales per row, False the other one."""
    function, a, b, _ = exact_operands(name, (m, k, n), left, right)
    reference = float64(name, a, b).to(dtype)
    for fast_accum in (False, True):
        result = function(a, b, dtype, fast_accum=fast_accum, emulate=emulate)
        assert result.shape == reference.shape
        assert torch.equal(result, reference)


@every_gemm
@every_mixture
@pytest.mark.parametrize("sizes", [(0, 16, 32), (0, 3, 5), (4, 0, 16), (4, 16, 0)], ids=str)
def test_nothing_times_nothing_is_zero(
    name: str, left: Granularity, right: Granularity, sizes: tuple[int, int, int]
) -> None:
    function, a, b, which = exact_operands(name, sizes, left, right)
    m, k, n = sizes
    for dtype, emulate in itertools.product(OUT_DTYPES, (False, True)):
        result = function(a, b, dtype, emulate=emulate)
        assert result.shape == ((m, n), (m, k), (n, k))[which]
        assert result.dtype is dtype
        assert not result.any()


@every_gemm
@every_dtype
def test_high_precision_operands_are_multiplied_as_they_are(name: str, dtype: torch.dtype) -> None:
    function, a, b, _ = operands(name, (5, 7, 3), lambda _, shape, __: torch.randint(-4, 5, shape).bfloat16())
    for emulate in (False, True):
        result = function(a, b, dtype, emulate=emulate)
        assert result.dtype is dtype
        assert torch.equal(result, float64(name, a, b).to(dtype))


@every_gemm
def test_strides_of_an_operand_do_not_matter(name: str) -> None:
    function, a, b, _ = exact_operands(name, (16, 32, 48), "row", "tensor")
    expected = function(a, b, torch.float32)
    for t in (a, b):
        t.payload = t.payload.t().contiguous().t()
    assert torch.equal(function(a, b, torch.float32), expected)


# Within a bound where it can't


def random_operands(name: str, sizes: tuple[int, int, int], how: Cast) -> Any:
    return operands(name, sizes, lambda _, shape, axis: cast(torch.randn(shape).bfloat16(), how, axis))


@every_gemm
@every_dtype
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_emulation_differs_by_one_rounding(name: str, dtype: torch.dtype, granularity: Granularity) -> None:
    """Of the output's dtype, relative; and of float32's order of addition, absolute."""
    function, a, b, _ = random_operands(name, (64, 96, 80), Cast(E4M3, granularity=granularity))
    reference = float64(name, a, b)
    for fast_accum in (False, True):
        real = function(a, b, dtype, fast_accum=fast_accum).double()
        emulated = function(a, b, dtype, emulate=True).double()
        bound = torch.finfo(dtype).eps * reference.abs() + 1e-5 * reference.abs().max()
        assert ((real - emulated).abs() <= bound).all()
        assert ((real - reference).abs() <= bound).all()


@every_gemm
def test_with_powers_of_two_both_ways_to_scale_rows_agree_to_the_bit(name: str) -> None:
    """The kernel with scales per row (fast_accum), and scaling after the product: gemm.py says they are equal."""
    function, a, b, _ = random_operands(name, (64, 96, 80), Cast(E4M3, granularity="row", power_of_two=True))
    in_the_kernel = function(a, b, torch.bfloat16, fast_accum=True)
    assert torch.equal(in_the_kernel, function(a, b, torch.bfloat16, fast_accum=False))
    assert sqnr(float64(name, a, b), in_the_kernel) > 45


@every_gemm
def test_without_them_the_difference_would_be_seen(name: str) -> None:
    function, a, b, _ = random_operands(name, (64, 96, 80), Cast(E4M3, granularity="row"))
    in_the_kernel = function(a, b, torch.bfloat16, fast_accum=True)
    assert not torch.equal(in_the_kernel, function(a, b, torch.bfloat16, fast_accum=False))


@every_gemm
@every_dtype
@pytest.mark.parametrize("emulate", [False, True])
def test_autocast_does_not_touch_the_product(name: str, dtype: torch.dtype, emulate: bool) -> None:
    """Neither float32's, nor the one that torch's CPU kernel falls back to where the CPU has no float8."""
    function, a, b, _ = random_operands(name, (64, 96, 80), Cast(E4M3))
    expected = function(a, b, dtype, emulate=emulate)
    for autocast in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", autocast):
            assert torch.equal(function(a, b, dtype, emulate=emulate), expected)
            assert (a.payload.float() @ a.payload.float().t()).dtype is autocast, "it does touch what we don't protect"


@every_gemm
def test_float16_does_not_overflow_before_it_is_scaled(name: str) -> None:
    """256 products of 448 by 448 are 5e7, of what they stand for 256."""
    make = lambda _, shape, axis: cast(torch.ones(shape), Cast(E4M3, granularity="row"), axis)  # noqa: E731
    function, a, b, _ = operands(name, (256, 256, 256), make)
    for fast_accum, emulate in itertools.product((False, True), (False, True)):
        result = function(a, b, torch.float16, fast_accum=fast_accum, emulate=emulate)
        assert torch.equal(result, torch.full((256, 256), 256.0, dtype=torch.float16))


# In a layer


def step(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """output, grad_input, grad_weight and, where there is a bias, its gradient."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], g))


@every_recipe
@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(32, 16), (5, 3)])
def test_zero_tokens_have_zero_gradients(
    recipe: str, emulate: bool, bias: bool, leading: tuple[int, ...], k: int, n: int
) -> None:
    """Scenario 9."""
    layer = Float8Linear(k, n, bias=bias, dtype=torch.bfloat16, recipe=recipe)
    layer.recipe = Recipe(layer.recipe.output, layer.recipe.grad_input, layer.recipe.grad_weight, emulate=emulate)
    y, x_grad, *parameter_grads = step(layer, torch.empty(*leading, k).bfloat16(), torch.empty(*leading, n).bfloat16())
    assert (y.shape, x_grad.shape) == ((*leading, n), (*leading, k))
    for parameter, grad in zip(layer.parameters(), parameter_grads, strict=True):
        assert (grad.shape, grad.dtype) == (parameter.shape, parameter.dtype)
        assert not grad.any()


@every_recipe
@given(
    m=st.sampled_from([1, 5, 17]),
    k=st.sampled_from([1, 3, 8, 10, 16]),
    n=st.sampled_from([1, 7, 8, 10, 16]),
    bias=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_a_layer_of_any_size_is_as_good_as_its_emulation(recipe: str, m: int, k: int, n: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Float8Linear(k, n, bias=bias, recipe=recipe)
    x, g = torch.randn(m, k), torch.randn(m, n)
    real = step(layer, x, g)
    layer.recipe = Recipe(layer.recipe.output, layer.recipe.grad_input, layer.recipe.grad_weight, emulate=True)
    for actual, expected in zip(real, step(layer, x, g), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "output", "grad_input", "grad_weight"),
    [("tensorwise", 28.5, 24.5, 24.3), ("rowwise", 28.7, 28.7, 28.3), ("rowwise_with_gw_hp", 28.7, 28.5, 50.0)],
)
def test_the_signal_is_above_the_noise(recipe: str, output: float, grad_input: float, grad_weight: float) -> None:
    """1024x1024x1024, dB against bfloat16 and against float64: bfloat16 itself is above 50."""
    layer = Float8Linear(1024, 1024, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x, g = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    results = step(layer, x, g)
    plain = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    plain.weight = layer.weight
    bounds = (output, grad_input, grad_weight)
    for references in (step(plain, x, g), linear_float64(x, layer.weight.detach(), g)):
        found = [sqnr(reference, result) for reference, result in zip(references, results, strict=True)]
        assert all(db >= bound for db, bound in zip(found, bounds, strict=True)), found


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_a_compiled_step_has_the_bits_of_an_eager_one(recipe: str, dtype: torch.dtype) -> None:
    """A graph runs with autocast off, after tracing with it on; eagerly every op meets it."""
    layer, x, g = Float8Linear(48, 32, recipe=recipe), torch.randn(64, 48), torch.randn(64, 32).to(dtype)
    with torch.autocast("cpu", dtype):
        eager, compiled = step(layer, x, g), step(compile_counted(layer)[0], x, g)
    for actual, expected in zip(compiled, eager, strict=True):
        assert torch.equal(actual, expected)


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("leading", [(16,), (2, 24), (1,)], ids=str)
def test_the_output_is_torchaos_to_the_bit(
    dtype: torch.dtype, bias: bool, autocast: bool, leading: tuple[int, ...]
) -> None:
    for k, n in ((32, 64), (48, 16)):
        theirs = torchao.float8.convert_to_float8_training(nn.Sequential(nn.Linear(k, n, bias, dtype=dtype)))
        ours = Float8Linear(k, n, bias, dtype=dtype, recipe="tensorwise")
        ours.load_state_dict(theirs[0].state_dict())
        x = torch.randn(*leading, k, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = ours(x)
        expected = theirs(x.bfloat16() if autocast else x)  # theirs asks only whether a GPU's autocast is on
        assert actual.dtype is expected.dtype is (torch.bfloat16 if autocast else dtype)
        assert torch.equal(actual, expected)
