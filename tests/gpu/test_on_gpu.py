"""On a GPU: the real float8 GEMMs, and what Inductor makes of the casts. Every size is small: seconds, not minutes."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
import torch
from oracles import E4M3, E5M2, linear_float64, scale, sqnr
from test_cast import interesting, rounded
from torch import Tensor, nn

from float8_compile import Cast, Float8Linear, Recipe, gemm
from float8_compile.cast import cast, saturating_cast, scale_from_amax
from float8_compile.linear import _warn_eager

pytestmark = pytest.mark.filterwarnings("ignore:a Float8Linear runs eagerly on a GPU")
every_recipe = pytest.mark.parametrize("recipe", Recipe.names())

# Signal to noise in dB of output, grad_input and grad_weight: the bounds of the CPU's tests, less 0.5.
BOUNDS = {"tensorwise": (28, 24, 23.8), "rowwise": (28.2, 28.2, 27.8), "rowwise_with_gw_hp": (28.2, 28, 45)}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def layer_and_data(recipe: str, m: int, k: int, n: int, bias: bool = False) -> tuple[Float8Linear, Tensor, Tensor]:
    layer = Float8Linear(k, n, bias, "cuda", torch.bfloat16, recipe=recipe)
    x, g = (torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
    return layer, x.requires_grad_(), g


def step(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """output, grad_input, grad_weight and, where there is a bias, its gradient."""
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], g))


@every_recipe
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", [(512, 1024, 768), (512, 1000, 333), (17, 65, 31)], ids=str)
def test_a_step_is_float64s_but_for_float8s_noise(recipe: str, compiled: bool, sizes: tuple[int, int, int]) -> None:
    layer, x, g = layer_and_data(recipe, *sizes)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    references = linear_float64(x.detach(), layer.weight.detach(), g)
    found = [sqnr(reference, result) for reference, result in zip(references, step(run, x, g), strict=True)]
    slack = 0 if min(sizes) > 100 else 3  # few numbers, so the noise varies
    assert all(db >= bound - slack for db, bound in zip(found, BOUNDS[recipe], strict=True)), found


@every_recipe
@pytest.mark.parametrize("sizes", [(512, 1024, 768), (1, 16, 16), (16, 48, 1), (5, 10, 7), (0, 32, 16)], ids=str)
def test_compiled_and_eager_agree(recipe: str, sizes: tuple[int, int, int]) -> None:
    layer, x, g = layer_and_data(recipe, *sizes, bias=True)
    eager, compiled = step(layer, x, g), step(torch.compile(layer, fullgraph=True), x, g)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2 * float(b.abs().max()) if b.numel() else 0)


@every_recipe
def test_the_gemm_is_as_good_as_its_emulation(recipe: str) -> None:
    layer, x, g = layer_and_data(recipe, 64, 96, 80)
    real = step(layer, x, g)
    r = layer.recipe
    layer.recipe = Recipe(r.output, r.grad_input, r.grad_weight, emulate=True)
    for a, b in zip(real, step(layer, x, g), strict=True):
        assert sqnr(b, a) > 35  # bfloat16's rounding, and fast accumulation


def test_every_mixture_dtype_and_accumulation_is_exact_on_integers() -> None:
    how = {g: Cast(E4M3, granularity=g, power_of_two=True) for g in ("tensor", "row")}
    x, w = (torch.randint(-4, 5, shape, device="cuda").float() for shape in ((33, 48), (17, 48)))
    expected = x.double() @ w.double().t()
    for left, right, fast_accum in itertools.product(how, how, (False, True)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            result = gemm.output(cast(x, how[left]), cast(w, how[right]), dtype, fast_accum=fast_accum)
            assert torch.equal(result, expected.to(dtype)), (left, right, fast_accum, dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_casts_and_scales_have_the_cpus_bits(compiled: bool) -> None:
    amaxes = torch.rand(1000, 1, device="cuda", dtype=torch.bfloat16) * 1000
    for dtype in (E4M3, E5M2):

        def scale_and_cast(amaxes: Tensor, numbers: Tensor, one: Tensor, dtype: torch.dtype = dtype) -> list[Tensor]:
            scales = [scale_from_amax(amaxes, dtype, two_n) for two_n in (False, True)]
            return [*scales, saturating_cast(numbers, one, dtype)]

        numbers = [x for x in interesting(dtype) if x == x]  # a NaN may have other bits
        run = torch.compile(scale_and_cast, fullgraph=True) if compiled else scale_and_cast
        plain, two_n, codes = run(amaxes, torch.tensor(numbers, device="cuda"), torch.ones((), device="cuda"))
        for scales, power_of_two in ((plain, False), (two_n, True)):
            expected = [scale(amax, dtype, power_of_two) for amax in amaxes.flatten().tolist()]
            assert torch.equal(scales.flatten().cpu(), torch.tensor(expected))
        assert torch.equal(codes.view(torch.uint8).cpu(), rounded(numbers, dtype).view(torch.uint8))


def test_eager_warns_once_and_compiled_never() -> None:
    layer, x, g = layer_and_data("tensorwise", 32, 32, 32)
    for run, expected in ((torch.compile(layer, fullgraph=True), 0), (layer, 1)):
        _warn_eager.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step(run, x, g)
        assert sum("runs eagerly on a GPU" in str(w.message) for w in caught) == expected


@every_recipe
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_after_backward_only_gradients_and_the_output_are_alive(recipe: str, compiled: bool, recompute: bool) -> None:
    layer, x, g = layer_and_data(recipe, 1024, 1024, 1024)
    layer.recompute_weight_cast = recompute
    run = torch.compile(layer, fullgraph=True) if compiled else layer

    def grown() -> int:
        x.grad = layer.weight.grad = None
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = run(x)
        y.backward(g)
        assert y.grad_fn is not None  # alive, with its graph
        gc.collect()
        return torch.cuda.memory_allocated() - before

    grown()  # compiles, and fills caches
    assert grown() <= 3 * 2 * 1024 * 1024 + 4096, "y, x.grad and weight.grad in bfloat16"
