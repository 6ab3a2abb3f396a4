"""Checkpoints for others: a plain model, safetensors, torchao; and in parts, the weights here and the scales there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchao.float8
from delayed_checks import assert_same_bits, backward, batches, evidence, mlp, state_of, train, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

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


# The other part


@every_recipe
@from_both
def test_both_parts_are_the_whole(recipe: str, given: Callable[[nn.Module], Any]) -> None:
    model = trained(recipe)
    plain, scales = f8.plain_state_dict(given(model)), f8.float8_state_dict(given(model))
    assert plain.keys().isdisjoint(scales)
    assert len(scales) == (14 if recipe == "delayed" else 0)
    assert_same_bits({**plain, **scales}, dict(model.state_dict()))


def test_the_scales_are_copies_and_stay_what_they_were() -> None:
    model = trained()
    scales = f8.float8_state_dict(model)
    before = {name: tensor.clone() for name, tensor in scales.items()}
    assert {(type(t), t.dtype, t.requires_grad) for t in scales.values()} == {(Tensor, torch.float32, False)}
    train(model, model, DATA[2:4])
    assert_same_bits(scales, before)
    assert not torch.equal(model.state_dict()["0.fp8_scale_input"], before["0.fp8_scale_input"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_that_has_its_weights_takes_the_scales_alone(assign: bool) -> None:
    """And goes on as the one that they are from: amaxes, histories, and what Python knows."""
    source, model = trained(), mlp(K, N, K)
    backward(source, 10 * DATA[3])  # running amaxes too
    source.zero_grad()
    model.load_state_dict(f8.plain_state_dict(source))
    loaded = model.load_state_dict(f8.float8_state_dict(source), strict=False, assign=assign)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (PLAIN_KEYS, [])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})
    assert evidence(model) == evidence(source)
    for each in (model, source):
        train(each, each, DATA[2:4])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})


def test_another_models_scales_leave_weights_and_their_scales_alone() -> None:
    model, source = trained(), mlp(K, N, K)
    train(source, source, [100 * x for x in DATA])
    weights, before = weights_of(model), state_of(model)
    model.load_state_dict(f8.float8_state_dict(source), strict=False)
    assert_same_bits(weights_of(model), weights)
    expected = {name: before[name] if ".weight." in name else tensor for name, tensor in state_of(source).items()}
    assert_same_bits(state_of(model), expected)
    assert not torch.equal(state_of(source)["0.weight.scale"], before["0.weight.scale"])


# A checkpoint of a part of the model

PARTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "nothing": lambda state: {},
    "something else": lambda state: {"weight": torch.ones(2), "1.weight": torch.ones(2), "head.weight": torch.ones(2)},
    "the other layer": lambda state: {key: tensor for key, tensor in state.items() if key.startswith("2.")},
    "the other layer's weight": lambda state: {"2.weight": state["2.weight"]},
    "the other layer's scales": lambda state: {k: t for k, t in f8.float8_state_dict(state).items() if k[0] == "2"},
    "the bias": lambda state: {"0.bias": state["0.bias"]},
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_layer_of_which_a_checkpoint_has_nothing_keeps_its_scales(part: Callable[[Any], Any]) -> None:
    model, source = trained(), mlp(K, N, K)
    train(source, source, [100 * x for x in DATA])
    backward(model, DATA[3])
    before, known = state_of(model[0]), evidence(model[0])
    model.load_state_dict(part(source.state_dict()), strict=False)
    assert_same_bits(state_of(model[0]), before)
    assert evidence(model[0]) == known == dict.fromkeys(known, True)


def test_a_layer_by_itself_keeps_its_scales_too() -> None:
    """Its keys have no prefix."""
    layer = trained()[0]
    before = state_of(layer)
    layer.load_state_dict({"0.weight": torch.ones(2), "weights": torch.ones(2)}, strict=False)
    assert_same_bits(state_of(layer), before)


MADE_WEIGHTS: dict[str, Callable[[nn.Module], Any]] = {
    "as it is": lambda layer: layer,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "parametrized": parametrizations.weight_norm,
}


@pytest.mark.parametrize("make", MADE_WEIGHTS.values(), ids=MADE_WEIGHTS)
def test_a_layer_whose_weight_it_has_starts_afresh_and_the_others_go_on(make: Callable[[nn.Module], Any]) -> None:
    model = trained()
    make(model[0])
    before = state_of(model[2])
    state = {key: tensor for key, tensor in f8.plain_state_dict(model).items() if key.startswith("0.")}
    assert evidence(model)["0.input"]
    model.load_state_dict(state, strict=False)
    known = evidence(model)
    assert (known["0.input"], known["0.grad_output"]) == (False, False)
    assert_same_bits(state_of(model[2]), before)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_tied_weight_that_comes_under_another_name_is_measured(steps: int) -> None:
    """As files of safetensors have it: once. Its old scale would let the new weight saturate."""
    model = nn.Sequential(nn.Embedding(N, K), nn.Linear(K, N, bias=False))
    model[1].weight = model[0].weight
    f8.convert_to_float8_training(model, config="delayed")
    tokens = torch.arange(N)
    train(model, model, [tokens] * steps)
    state = {"0.weight": 8 * model[0].weight.detach().clone()}
    assert model.load_state_dict(state, strict=False).missing_keys == ["1.weight"]
    fresh = f8.convert_to_float8_training(nn.Linear(K, N, bias=False))
    fresh.load_state_dict({"weight": state["0.weight"]})
    model[1].input_scale.forget()  # the dynamic ones are what the other layer has
    assert torch.equal(model(tokens), fresh(state["0.weight"]))


def test_part_by_part_is_all_at_once() -> None:
    """As files of a large checkpoint are loaded, one after another, split where it happens to be."""
    source, model = trained(), mlp(K, N, K)
    state = list(source.state_dict().items())
    for part in (state[:2], state[2:11], state[11:]):
        model.load_state_dict(dict(part), strict=False)
    assert state[2][0] == "0.fp8_amax_input"
    assert state[11][0] == "2.fp8_amax_input"
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})
    assert evidence(model) == evidence(source)


# Layers that share a scale, and safetensors


class Projections(nn.Module):
    """q and k read the same tensor, and calibration has them share its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.q = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)


def projections(shared: bool, steps: int = 2) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = f8.convert_to_float8_training(Projections(), config="delayed")
    if shared:
        model.k.input_scale = model.q.input_scale
    train(model, model, DATA[:steps])
    return model


by_sharing = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])


@by_sharing
@pytest.mark.parametrize("into_shared", [False, True], ids=["into each its own", "into shared"])
@pytest.mark.parametrize("way", ["save_file", "save_model"])
def test_safetensors_takes_it_whole(shared: bool, into_shared: bool, way: str, tmp_path: Path) -> None:
    """It has one tensor for each key, so safetensors finds none shared, and any model loads it strictly."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra ecosystem")
    source, model = projections(shared), projections(into_shared, steps=1)
    if way == "save_file":
        safetensors.save_file(source.state_dict(), tmp_path / "model")
        model.load_state_dict(safetensors.load_file(tmp_path / "model"), strict=True)
    else:
        safetensors.save_model(source, str(tmp_path / "model"))
        safetensors.load_model(model, tmp_path / "model", strict=True)
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})
    assert evidence(model) == evidence(source) == dict.fromkeys(evidence(source), True)


@by_sharing
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is here
def test_torchs_distributed_checkpoint_is_loaded_as_torch_says(shared: bool, tmp_path: Path) -> None:
    """It fills the tensors of a state dict, which of scales are copies, and then the model is given that."""
    source, model = projections(shared), projections(shared, steps=1)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    room = model.state_dict()
    dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    model.load_state_dict(room)
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})


# torchao


@every_recipe
def test_torchaos_checkpoint_is_ours_and_ours_is_torchaos(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keep nn.Linear's keys; delayed scales, which torchao has no more, go as for a plain model."""
    monkeypatch.setattr("torchao.float8._inductor_patch._patch_inductor_min_max_codegen", lambda: None)  # for good
    name = "rowwise" if recipe == "rowwise" else "tensorwise"
    config = torchao.float8.Float8LinearConfig.from_recipe_name(name)
    theirs = torchao.float8.convert_to_float8_training(plain_model(), config=config)
    train(theirs, theirs, DATA[:2])
    ours = mlp(K, N, K, config=recipe)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_bits(weights_of(ours), weights_of(theirs))
    train(ours, ours, DATA[2:4])
    theirs.load_state_dict(f8.plain_state_dict(ours), strict=True)
    assert_same_bits(weights_of(theirs), weights_of(ours))
    if recipe == "tensorwise":
        assert torch.equal(theirs(DATA[0]), ours(DATA[0]))
    if recipe != "delayed":
        theirs.load_state_dict(ours.state_dict(), strict=True)
