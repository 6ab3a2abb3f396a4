"""On a GPU: CUDA graphs of float8 layers, weight caching and flat gradients, against the same steps without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8_compile as f8

pytestmark = pytest.mark.filterwarnings("ignore:a Float8Linear runs eagerly on a GPU")
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
STEPS, MICROBATCHES, TOKENS, K = 3, 2, 128, 256


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def model_of(recipe: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(K, 512), nn.GELU(), nn.Linear(512, K)).to("cuda", torch.bfloat16)
    return f8.convert_to_float8_training(layers, config=recipe)


def batch(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(10 * step + microbatch)
    return torch.randn(TOKENS, K, device="cuda", dtype=torch.bfloat16, generator=generator)


def calibrated(model: nn.Module) -> None:
    if model[0].input_scale is not None:  # type: ignore[index]
        with f8.calibrate(model):
            model(batch(9, 9)).float().square().sum().backward()
        model.zero_grad()


def trained(model: nn.Module, run: Any, flat: bool = False) -> list[Tensor]:
    """Gradients of each step, parameters and delayed scales after the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    gradients = f8.FlatGradients(model.parameters()) if flat else None
    if gradients is not None:
        gradients.attach(optimizer)
    seen = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            run(batch(step, microbatch)).float().square().sum().backward()
        seen += [gradients.flat.clone()] if gradients else [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    state = [t for name, t in model.state_dict().items() if "amax" in name or "scale" in name]
    return [*seen, *(p.detach() for p in model.parameters()), *state]


@every_recipe
@pytest.mark.parametrize("cached", [False, True])
def test_graphed_is_bitwise_eager(recipe: str, cached: bool) -> None:
    eager, graphed = model_of(recipe), model_of(recipe)
    for model in (eager, graphed):
        calibrated(model)
    if cached:
        f8.cache_weight_casts(graphed)
    f8.make_graphed_callables(graphed, (batch(0, 0).requires_grad_(),))
    for actual, expected in zip(trained(graphed, graphed), trained(eager, eager), strict=True):
        assert torch.equal(actual, expected)


@every_recipe
def test_graphed_with_flat_gradients_is_bitwise_eager(recipe: str) -> None:
    eager, graphed = model_of(recipe), model_of(recipe)
    for model in (eager, graphed):
        calibrated(model)
    expected = trained(eager, eager, flat=True)
    optimizer = torch.optim.AdamW(graphed.parameters(), lr=1e-3, fused=True)
    gradients = f8.FlatGradients(graphed.parameters())
    gradients.attach(optimizer)
    f8.make_graphed_callables(graphed, (batch(0, 0).requires_grad_(),))
    assert not gradients.flat.any(), "put back after the warm-up"
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            graphed(batch(step, microbatch)).float().square().sum().backward()
        assert torch.equal(gradients.flat, expected[step])
        optimizer.step()
        optimizer.zero_grad()


@every_recipe
@pytest.mark.parametrize("cached", [False, True])
def test_reduce_overhead_is_not_skipped(recipe: str, cached: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model, plain = model_of(recipe), model_of(recipe)
    for one in (model, plain):
        calibrated(one)
    if cached:
        f8.cache_weight_casts(model)
    default = trained(plain, torch.compile(plain, fullgraph=True))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def run(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = trained(model, run)
    for actual, expected in zip(results, default, strict=True):
        assert torch.equal(actual, expected)
    said = capfd.readouterr()
    assert "skipping cudagraphs" not in said.out + said.err + " ".join(str(w.message) for w in caught)


@every_recipe
def test_caching_casts_all_weights_in_one_compiled_call_and_changes_no_bit(recipe: str) -> None:
    cached, plain = model_of(recipe), model_of(recipe)
    with f8.cache_weight_casts(cached) as handle:
        results = trained(cached, cached)
        assert handle._compiled is not None
    for actual, expected in zip(results, trained(plain, plain), strict=True):
        assert torch.equal(actual, expected)


def test_flat_gradients_peak_below_1_45_of_the_buffer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).to("cuda", torch.bfloat16)
    f8.convert_to_float8_training(model)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    gradients = f8.FlatGradients(model.parameters())
    compiled(x).float().square().mean().backward()
    gradients.zero_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - gradients.flat.nbytes
    for _ in range(4):
        compiled(x).float().square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.45 * gradients.flat.nbytes
