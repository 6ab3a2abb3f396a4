"""Cached weights under test: a model whose weights are cast once a step beside one that casts them each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compile_checks import compile_counted
from delayed_checks import Run, State, assert_same_bits, backward, batches, gradients_of, layers_of, mlp, weights_of
from torch import Tensor, nn

import float8_compile as f8

K = 32
WIDTHS = (K, 48, 40, 56, K)
SHAPES = {(48, K), (40, 48), (56, 40), (K, 56)}  # (N, K) of its layers; no batch of ours has one


def every_recipe(linear: nn.Linear, fqn: str) -> str:
    """Layers 0, 2, 4 and 6 with a recipe each."""
    return f8.Recipe.names()[int(fqn) // 2 % len(f8.Recipe.names())]


@dataclass
class Twins:
    """Two equal models, of which one has a cache. run: the cached one, or what it was compiled to."""

    cached: Any
    plain: Any
    handle: Any
    run: Run
    counter: Any = None

    def both(self, function: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What it gives for each of the two."""
        return function(self.cached), function(self.plain)

    def assert_same_outputs(self, x: Tensor | None = None) -> None:
        """In training, where the cache is read, without leaving gradients."""
        x = some_batch(self.cached) if x is None else x
        assert_equal(self.run(x), self.plain(x))

    def assert_same_step(self, x: Tensor | None = None) -> None:
        """Outputs and gradients, also the input's; none are left."""
        x = some_batch(self.cached) if x is None else x
        gradients = []
        for model, run in ((self.cached, self.run), (self.plain, self.plain)):
            leaf = x.detach().clone().requires_grad_()
            loss = backward(run, leaf)
            assert leaf.grad is not None
            gradients.append({**gradients_of(model), "the loss": loss, "the input": leaf.grad})
            model.zero_grad()
        assert_same_bits(*gradients)


def twins(
    *widths: int,
    config: Any = every_recipe,
    recompute: Any = True,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    backend: str = "aot_eager",
    calibrated: bool = False,
) -> Twins:
    """Small MLPs, of every recipe unless told otherwise. The plain one runs eagerly: aot_eager has the same bits."""

    def made() -> Any:
        model = mlp(*(widths or WIDTHS), config=config, recompute=recompute).to(dtype)
        if calibrated:
            f8.mark_calibrated(model)
        return model

    return twins_of(made, compiled=compiled, backend=backend)


def twins_of(make: Callable[[], Any], compiled: bool = False, backend: str = "aot_eager") -> Twins:
    """The same of a model that `make` makes, equal each time."""
    cached, plain = make(), make()
    run, counter = compile_counted(cached, backend=backend) if compiled else (cached, None)
    return Twins(cached, plain, f8.cache_weight_casts(cached), run, counter)


def some_batch(model: nn.Module) -> Tensor:
    """For a model whose first layer is a linear one."""
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return batches(1, 8, first.in_features)[0].to(first.weight.dtype)


def train_in_microbatches(
    model: Any, run: Run, optimizer: torch.optim.Optimizer, steps: int = 3, microbatches: int = 4, rows: int = 8
) -> list[State]:
    """Of each step the outputs and the gradients, and of the last one the parameters."""
    seen: list[State] = []
    data = iter(batches(steps * microbatches, rows, next(model.parameters()).shape[1]))
    for _ in range(steps):
        losses = {}
        for number in range(microbatches):
            x = next(data).to(next(model.parameters()).dtype)
            losses[f"loss {number}"] = backward(run, x)
        seen.append({**gradients_of(model), **losses})
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, weights_of(model)]


def casts_of(model: nn.Module) -> list[Any]:
    """The cached casts of its layers, those that have one."""
    return [layer.cached_weight for layer in layers_of(model) if layer.cached_weight is not None]


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Payloads and scales of all cached weights."""
    return [tensor for cast in casts_of(model) for tensor in cast.tensors()]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """To the bit; NaN is NaN."""
    assert_same_bits({"": actual}, {"": expected})


def assert_untouched(model: nn.Module) -> None:
    """No cache, and no trace of one at the parameters."""
    assert casts_of(model) == []
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not [name for name in vars(parameter) if not name.startswith("_dynamo")]
