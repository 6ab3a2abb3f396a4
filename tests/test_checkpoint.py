"""A delayed model's checkpoint for a plain model: without what is delayed scaling's, with all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_checks import batches, mlp, train
from torch import Tensor, nn

import float8_compile as f8

K, N = 32, 48
DATA = batches(4, 16, K)
PLAIN_KEYS = ["0.weight", "0.bias", "2.weight", "2.bias"]
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))


def trained(recipe: str = "delayed") -> nn.Module:
    model = mlp(K, N, K, config=recipe)
    train(model, model, DATA[:2])
    return model


SOURCES: dict[str, Callable[[nn.Module], Any]] = {"model": lambda model: model, "state dict": nn.Module.state_dict}
from_both = pytest.mark.parametrize("given", SOURCES.values(), ids=SOURCES)


@every_recipe
@from_both
def test_it_loads_strictly_into_a_plain_model(recipe: str, given: Callable[[nn.Module], Any]) -> None:
    """Scenario 41: delayed, or anything else, into plain."""
    model, plain = trained(recipe), plain_model()
    state = f8.plain_state_dict(given(model))
    assert list(state) == PLAIN_KEYS
    plain.load_state_dict(state, strict=True)
    with f8.float8_disabled(model):
        assert torch.equal(plain(DATA[2]), model(DATA[2]))


def test_without_it_a_plain_model_refuses() -> None:
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"0.fp8_amax_input"'):
        plain_model().load_state_dict(trained().state_dict(), strict=True)


@from_both
def test_what_is_given_stays_as_it_is_and_its_tensors_are_the_same_ones(given: Callable[[nn.Module], Any]) -> None:
    source = given(model := trained())
    before = dict(model.state_dict())
    plain = f8.plain_state_dict(source)
    assert all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in plain.items())
    assert (source if isinstance(source, dict) else source.state_dict()).keys() == before.keys()


def test_it_is_what_torch_gives_for_a_plain_model() -> None:
    """Its kind of dict, with the versions of modules that loading asks for."""
    model, plain = trained(), plain_model()
    ours, torchs = f8.plain_state_dict(model), plain.state_dict()
    assert type(ours) is type(torchs)
    assert ours._metadata == torchs._metadata


class Gated(nn.Module):
    """Has names that begin as ours do."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_gate = nn.Parameter(torch.ones(K))
        self.fp8_up = nn.Linear(K, N)
        self.register_buffer("fp8_scale", torch.ones(()))
        self.fp8_scale_input_norm = nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        return self.fp8_up(self.fp8_scale_input_norm(x * self.fp8_gate * self.fp8_scale))


def test_others_names_stay() -> None:
    plain = Gated().state_dict()
    model = f8.convert_to_float8_training(Gated(), config="delayed")
    assert len(model.state_dict()) == len(plain) + 7
    assert list(f8.plain_state_dict(model)) == list(plain)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.blocks.0."])
def test_under_any_prefix(prefix: str) -> None:
    layer = mlp(K, N)[0]
    state = layer.state_dict(prefix=prefix)
    assert list(f8.plain_state_dict(state)) == [f"{prefix}weight", f"{prefix}bias"]
    assert list(f8.plain_state_dict(layer)) == ["weight", "bias"]


def test_float8_experimentals_checkpoint_becomes_plain_too() -> None:
    """It has amaxes and histories of weights as well. A converted model takes it, and a plain one after this."""
    number = torch.ones(())
    old = {f"0.fp8_{name}_{role}": number for name in ("amax", "scale") for role in ("input", "weight", "grad_output")}
    old |= {f"0.fp8_amax_history_{role}": torch.ones(16) for role in ("input", "weight", "grad_output")}
    state = {**plain_model().state_dict(), **old}
    assert list(f8.plain_state_dict(state)) == PLAIN_KEYS
    for recipe in f8.Recipe.names():
        mlp(K, N, K, config=recipe).load_state_dict(state, strict=True)
