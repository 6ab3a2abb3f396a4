"""Delayed scaling under test: small models, a training loop, every number of the state, and what it should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import float8_compile as f8
from float8_compile.delayed_step import scales_of

K = 32
Run = Callable[[Tensor], Tensor]
State = dict[str, Tensor]


def plain_mlp(*widths: int, between: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers of these widths, the first one the input's, with something between them; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential()
        for k, n in itertools.pairwise(widths):
            model.extend([between(), nn.Linear(k, n)] if len(model) else [nn.Linear(k, n)])
    return model


def mlp(*widths: int, config: Any = "delayed", recompute: Any = True, between: type[nn.Module] = nn.GELU) -> Any:
    """The same, converted."""
    model = plain_mlp(*widths, between=between)
    return f8.convert_to_float8_training(model, config=config, recompute_weight_cast=recompute)


def layers_of(model: nn.Module) -> list[f8.Float8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, f8.Float8Linear)]


def batches(count: int, *shape: int) -> list[Tensor]:
    """Of different magnitudes, so that scales have something to follow; the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * (1 + number % 5) for number in range(count)]


def backward(run: Run, x: Tensor) -> Tensor:
    """The loss, after its backward pass."""
    y = run(x)
    loss = (y.float() * torch.linspace(-1, 1, y.shape[-1])).square().sum() / y.shape[-1]
    loss.backward()
    return loss.detach()


def train(model: nn.Module, run: Run, data: Iterable[Tensor], optimizer: Any = None) -> list[Tensor]:
    """A step for each batch; the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in data:
        losses.append(backward(run, x))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(model: nn.Module) -> State:
    """Every number of the delayed state, by layer, role and name, as it is now. Without a scale, 1 / scale is 0."""
    state = {}
    for fqn, module in model.named_modules():
        for role, entry in scales_of(module).items():
            numbers = {
                "amax": entry.amax,
                "amax_history": entry.amax_history,
                "scale": entry.scale,
                "unscale": torch.where(entry.scale > 0, entry.unscale, 0.0),
            }
            state.update({f"{fqn}.{role}.{name}": t.clone() for name, t in numbers.items() if t is not None})
    return state


def settled_state_of(model: nn.Module) -> State:
    """The same without running amaxes, which passes through the model move between updates."""
    return {name: tensor for name, tensor in state_of(model).items() if not name.endswith(".amax")}


def weights_of(model: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> State:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_bits(actual: State, expected: State) -> None:
    """The same names, and for each the same numbers; NaN is NaN."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda message, name=name: f"{name}: {message}"
        )


def evidence(model: nn.Module) -> dict[str, bool]:
    """Of each layer and role, whether Python knows of a scale."""
    return {
        f"{fqn}.{role}": entry.calibrated
        for fqn, module in model.named_modules()
        for role, entry in scales_of(module).items()
    }
