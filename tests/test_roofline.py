"""The estimate by which layers are chosen: a roofline, with what Inductor's casts move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from float8_compile import Cast, Gemm, Recipe
from float8_compile.roofline import GEMM_SHARE, LAUNCH, MEMORY_SHARE, bf16_step, cast_traffic, float8_step
from float8_compile.targets import TARGETS

H100 = TARGETS["H100"]
M, K, N = 8192, 4096, 14336
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "preview_llama.json"


def test_a_large_layer_is_bound_by_flops() -> None:
    step = bf16_step(M, K, N, H100)
    assert step.gemms == pytest.approx(3 * 2 * M * K * N / (GEMM_SHARE * H100.bfloat16))
    assert (step.casts, step.launches) == (0, 3)
    assert step.seconds == step.gemms + 3 * LAUNCH
    assert float8_step(M, K, N, H100, Recipe.from_name("delayed")).gemms == pytest.approx(step.gemms / 2)


def test_a_thin_layer_is_bound_by_memory() -> None:
    m, k, n = 16, 4096, 4096
    step = bf16_step(m, k, n, H100)
    assert step.gemms == pytest.approx(3 * 2 * (m * k + n * k + m * n) / (MEMORY_SHARE * H100.bandwidth))


# Bytes an element of input, weight and gradient, of a bfloat16 layer, and kernels.
TRAFFIC = {
    # An input's amax comes with its producer, so it is read once, and written in two layouts; a gradient's is a read of
    # its own; a weight is read for its amax, and in forward and backward.
    "tensorwise": ((2 + 2, 2 + 2 + 1 + 1 + 2, 2 + 2 + 1 + 1), 8),
    "delayed": ((2, 2 + 2 + 1 + 1 + 2, 2 + 1 + 1), 5),
    "rowwise": ((2 + 1 + 2 + 2 + 1, 2 * (2 + 2 + 1), 2 * (2 + 2 + 1)), 11),
    "rowwise_with_gw_hp": ((2 + 1, 2 * (2 + 2 + 1), 2 + 2 + 1), 7),
}


@pytest.mark.parametrize(("recipe", "expected", "kernels"), [(r, e, n) for r, (e, n) in TRAFFIC.items()])
def test_what_casts_move(recipe: str, expected: tuple[int, int, int], kernels: int) -> None:
    x, w, g = expected
    assert cast_traffic(M, K, N, Recipe.from_name(recipe)) == (M * K * x + N * K * w + M * N * g, kernels)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_weight_that_is_kept_is_read_once_less(recipe: str) -> None:
    again, kept = (cast_traffic(M, K, N, Recipe.from_name(recipe), recompute) for recompute in (True, False))
    assert (again[0] - kept[0], again[1] - kept[1]) == (2 * N * K, 1)


def test_high_precision_is_not_cast() -> None:
    plain = Gemm(Cast(None), Cast(None))
    recipe = Recipe(plain, plain, plain)
    assert cast_traffic(M, K, N, recipe) == (0, 0)
    assert float8_step(M, K, N, H100, recipe) == bf16_step(M, K, N, H100)


@pytest.mark.parametrize("recipe", Recipe.names())
def test_it_is_of_the_size_of_what_inductor_generates(recipe: str) -> None:
    """Of a Llama-3-8B layer, against the preview's count of all Triton kernels beyond bf16's. It is more: q, k, v and
    gate, up read one tensor, which is cast once; what is only read to be cast is never written in bfloat16; and it
    holds a delayed weight's amax, which is after the step."""
    counted = json.loads(RESULTS.read_text())["recipes"]
    beyond = counted[recipe]["totals"]["triton"]["sectors"] - counted["bf16"]["totals"]["triton"]["sectors"]
    layers = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]
    estimate = sum(cast_traffic(8192, k, n, Recipe.from_name(recipe))[0] for k, n in layers)
    assert 1 < estimate / beyond < 2.5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", Recipe.names())
def test_larger_layers_and_more_tokens_gain_more(recipe: str, target: str) -> None:
    gpu, how = TARGETS[target], Recipe.from_name(recipe)

    def gain(m: int, size: int) -> float:
        plain = bf16_step(m, size, size, gpu)
        return plain.seconds / float8_step(m, size, size, gpu, how).seconds

    for gains in ([gain(8192, 2**n) for n in range(9, 15)], [gain(2**n, 4096) for n in range(9, 15)]):
        assert gains == sorted(gains)
        assert gains[0] < gains[-1] < 2


def test_delayed_gains_more_than_dynamic_scaling() -> None:
    gains = {r: float8_step(M, K, N, H100, Recipe.from_name(r)).seconds for r in Recipe.names()}
    assert min(gains, key=gains.__getitem__) == "delayed"
