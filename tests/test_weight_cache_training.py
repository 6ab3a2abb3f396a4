"""A cache in every kind of training: several optimizers, frozen and tied weights, transforms, settings that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cache_checks import assert_equal, twins, twins_of
from delayed_checks import (
    K,
    assert_same_bits,
    backward,
    batches,
    layers_of,
    mlp,
    plain_mlp,
    weights_of,
)
from fresh_process import run_python
from test_weight_cache_passes import Frame, Run, assert_same_training, eagerly_and_traced
from test_weight_cache_writes import WRITES
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import float8_compile as f8

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


# Optimizers


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, lr=1e-2), lambda p: AdamW(p, lr=1e-2, fused=True)], ids=["SGD", "fused"]
)
def test_a_step_that_a_grad_scaler_skips_changes_nothing(make: Any) -> None:
    """A fused optimizer is called all the same, and told that it shall not write."""

    def trained(model: Any) -> list[Tensor]:
        optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        seen = []
        for number, x in enumerate(batches(4, 8, K)):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if number == 1:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.detach())
        return [*seen, *weights_of(model).values()]

    both = twins()
    for actual, expected in zip(*both.both(trained), strict=True):
        assert_equal(actual, expected)


@eagerly_and_traced
def test_two_models_that_take_turns(compiled: bool) -> None:
    """A step of the discriminator between the generator's forward and its backward leaves the generator's casts."""

    def trained(models: Any, runs: list[Run]) -> dict[str, Tensor]:
        optimizers = [AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
        for x in batches(3, 8, K):
            fake = runs[0](x)
            runs[1](fake.detach()).square().mean().backward()
            optimizers[1].step()
            runs[1](fake).mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return weights_of(models)

    results = []
    for cached in (True, False):
        models = nn.ModuleList([mlp(K, 48, K, config="tensorwise", recompute=False) for _ in range(2)])
        if cached:
            f8.cache_weight_casts(models)
        compile: Any = torch.compile
        runs = [compile(m, backend="aot_eager", fullgraph=True) if compiled and cached else m for m in models]
        results.append(trained(models, runs))
    assert_same_bits(*results)


@eagerly_and_traced
@pytest.mark.parametrize("tied", [False, True])
def test_an_optimizer_for_each_parameter_may_step_inside_backward(tied: bool, compiled: bool) -> None:
    def made() -> Any:
        model = mlp(K, K, K, config="tensorwise")
        if tied:
            model[2].weight = model[0].weight
        return model

    both = twins_of(made, compiled=compiled)

    def trained(model: Any, run: Run) -> dict[str, Tensor]:
        optimizers = {p: AdamW([p], lr=1e-2, fused=True) for p in model.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
        for x in batches(3, 8, K):
            backward(run, x)
        return weights_of(model)

    assert_same_bits(trained(both.cached, both.run), trained(both.plain, both.plain))


# Which gradients are wanted


def frozen(model: Any, *numbers: int) -> Any:
    for number in numbers:
        model[number].requires_grad_(False)
    return model


FROZEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: mlp(32, 48, 40, 32, config=lambda _, fqn: "rowwise" if fqn == "2" else "tensorwise"),
    "the middle": lambda: frozen(FROZEN["nothing"](), 2),
    "the first": lambda: frozen(FROZEN["nothing"](), 0),
    "all but the last": lambda: frozen(FROZEN["nothing"](), 0, 2),
}


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("input_gradient", [False, True])
def test_whatever_is_frozen_the_gradients_are_those_of_no_cache(name: str, input_gradient: bool) -> None:
    both = twins_of(FROZEN[name])
    frame: Frame = lambda model, run: lambda x: run(x.clone().requires_grad_(input_gradient))  # noqa: E731
    assert_same_training(both, frame)


def test_a_frozen_weight_that_is_written_to_is_cast_again() -> None:
    both = twins_of(FROZEN["the middle"])
    both.both(WRITES[".data.copy_"])
    both.assert_same_step()


@eagerly_and_traced
def test_tied_weights(compiled: bool) -> None:
    """Two layers, one parameter; and an embedding, which is no Float8Linear."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(24, K), plain_mlp(K, K, K)
            self.head = nn.Linear(K, 24, bias=False)
            self.head.weight = self.embedding.weight
            self.body[2].weight = self.body[0].weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(tokens)))

    def made() -> Any:
        torch.manual_seed(0)
        return f8.convert_to_float8_training(Tied(), config="tensorwise")

    both = twins_of(made, compiled=compiled)
    assert both.cached.head.weight is both.cached.embedding.weight
    optimizers = both.both(lambda model: AdamW(model.parameters(), lr=1e-2, fused=True))
    for tokens in torch.arange(24).view(3, 8):
        for run, optimizer in zip((both.run, both.plain), optimizers, strict=True):
            backward(run, tokens)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(*both.both(weights_of))
    both.both(lambda model: model.embedding.weight.data.mul_(2))
    assert_equal(both.run(tokens), both.plain(tokens))
    both.handle.remove()
    assert {type(p) for p in both.cached.parameters()} == {nn.Parameter}


# Parameters from outside, and transforms


@eagerly_and_traced
def test_with_parameters_from_outside_the_cache_stays_aside(compiled: bool) -> None:
    both = twins(32, 48, 40, config="tensorwise")

    def call(model: Any, factor: float) -> Run:
        parameters = {name: factor * p.detach() for name, p in model.named_parameters()}
        return lambda x: torch.func.functional_call(model, parameters, (x,))

    x = batches(1, 8, K)[0]
    for factor in (1.0, 3.0):
        run = call(both.cached, factor)
        run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        assert_equal(run(x), call(both.plain, factor)(x))
    both.assert_same_step()


@pytest.mark.parametrize("write", ["nothing", ".data.copy_"])
def test_under_a_transform_the_gradients_are_those_of_no_cache(write: str) -> None:
    """Which allows no write to a tensor from outside."""
    both, x = twins(), batches(1, 8, K)[0]
    if write != "nothing":
        both.both(WRITES[write])
    assert_equal(*both.both(lambda model: torch.func.grad(lambda x: model(x).square().sum())(x)))
    both.assert_same_step()


def test_a_compiled_transform_is_refused_as_without_a_cache() -> None:
    """And gives no zeros. In a process of its own, since torch leaves autograd's hooks disabled behind."""
    code = """
        import warnings; warnings.simplefilter("ignore")  # torch's own deprecations
        import torch, float8_compile as f8
        model = f8.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16)))
        f8.cache_weight_casts(model)
        gradient = torch.func.grad(lambda x: model(x).square().sum())
        try:
            torch.compile(gradient, backend="aot_eager", fullgraph=True)(torch.ones(4, 16))
        except Exception as error:
            print("saved tensor hooks" in str(error))
        """
    assert run_python(code).split()[-1] == "True"


# Settings


@eagerly_and_traced
def test_another_recipe_gets_other_casts(compiled: bool) -> None:
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    for name in ("rowwise", "delayed", "tensorwise"):
        for model in (both.cached, both.plain):
            model[0].recipe = f8.Recipe.from_name(name)
        both.assert_same_step()
        both.both(WRITES["AdamW, fused"])
        both.assert_same_step()


def test_converting_once_more_gets_other_casts() -> None:
    both = twins(32, 48, 40, config="tensorwise")
    both.both(lambda model: f8.convert_to_float8_training(model, config="rowwise"))
    both.assert_same_step()
    assert_same_training(both)


@eagerly_and_traced
def test_flipping_recompute_weight_cast_changes_no_number(compiled: bool) -> None:
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    for recompute in (False, True):
        for layer in layers_of(both.cached):
            layer.recompute_weight_cast = recompute
        both.assert_same_step()


def test_float8_disabled_uses_no_cast_and_spoils_none() -> None:
    both = twins()
    with f8.float8_disabled(both.cached), f8.float8_disabled(both.plain):
        both.assert_same_step()
        both.both(WRITES[".data.copy_"])
        both.assert_same_step()
    both.assert_same_step()


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process_group")
def test_under_ddp_training_has_the_bits_of_no_cache() -> None:
    both = twins()
    wrapped = nn.parallel.DistributedDataParallel(both.cached)
    assert_same_training(both, lambda model, run: wrapped if model is both.cached else run)
