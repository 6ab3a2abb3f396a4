"""Delayed scales are a part of their layer: they follow it to other dtypes and devices, into copies and checkpoints.

Most tests begin with an MLP that has trained three steps, so that there are histories, and a scale for everything.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state_dict
from compile_checks import compile_counted
from delayed_checks import (
    assert_same_bits,
    backward,
    batches,
    evidence,
    layers_of,
    mlp,
    settled_state_of,
    state_of,
    train,
    weights_of,
)
from fresh_process import run_python
from oracles import E4M3, LARGEST, delayed_update, scale
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import float8_compile as f8
from float8_compile.delayed import DelayedScale
from float8_compile.delayed_step import scales_of

K, N = 32, 48
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DATA = batches(8, 16, K)
RECIPE = f8.Recipe.from_name("delayed")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


def trained(steps: int = 3, **options: Any) -> nn.Module:
    model = mlp(K, N, K, **options)
    train(model, model, DATA[:steps])
    return model


def split(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What belongs to inputs and gradients, and what to weights."""
    of_weights = {name: tensor for name, tensor in state.items() if ".weight." in name}
    return {name: tensor for name, tensor in state.items() if name not in of_weights}, of_weights


def exact_scale(layer: nn.Linear) -> float:
    return scale(layer.weight.abs().max().item(), E4M3)


def output(layer: f8.Float8Linear, x: Tensor, input_scale: Tensor, weight_scale: float) -> Tensor:
    """What the layer gives with these scales, in float64."""

    def rounded(t: Tensor, by: float) -> Tensor:
        return (t.float() * by).clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3).double() / by

    with torch.no_grad():
        return rounded(x, input_scale.item()) @ rounded(layer.weight, weight_scale).t() + layer.bias.double()


def assert_output_is_exact(layer: f8.Float8Linear, x: Tensor, input_scale: Tensor) -> None:
    """With the weight's scale from the weight as it is, so that nothing of it saturates or is flushed."""
    with torch.no_grad():
        actual = layer(x)
    expected = output(layer, x, input_scale, exact_scale(layer))
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item())


# Another dtype

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16()": nn.Module.bfloat16,
    "half()": nn.Module.half,
    "to(bfloat16)": lambda model: model.to(BF16),
    "to('cpu', float16)": lambda model: model.to("cpu", FP16),
    "type(bfloat16)": lambda model: model.type(BF16),
    "double()": nn.Module.double,
    "there and back": lambda model: model.bfloat16().half().double().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_state_stays_float32_with_the_same_bits(cast: Callable[[nn.Module], nn.Module]) -> None:
    """Scenario 35. A weight was rounded, so its scale is taken from it once more: until the next step in the graph."""
    model = trained()
    backward(model, DATA[3])  # running amaxes as well
    (kept, _), known = split(state_of(model)), evidence(model)
    (now, of_weights) = split(state_of(cast(model)))
    assert {tensor.dtype for tensor in state_of(model).values()} == {FP32}
    assert_same_bits(now, kept)
    assert not any(map(torch.any, of_weights.values()))
    assert evidence(model) == {name: not name.endswith("weight") for name in known}


@pytest.mark.parametrize(
    "cast",
    [nn.Module.float, nn.Module.cpu, lambda m: m.to(FP32), lambda m: m.to("cpu"), nn.Module.share_memory],
    ids=["float()", "cpu()", "to(float32)", "to('cpu')", "share_memory()"],
)
def test_what_is_the_model_s_already_changes_nothing(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = trained()
    before, known = state_of(model), evidence(model)
    cast(model)
    assert_same_bits(state_of(model), before)
    assert evidence(model) == known == dict.fromkeys(known, True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_next_forward_after_a_cast_is_right(dtype: torch.dtype) -> None:
    model = trained()
    input_scale = state_of(model)["0.input.scale"]
    assert_output_is_exact(model.to(dtype)[0], DATA[3].to(dtype), input_scale)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_one_step_after_a_cast_every_scale_is_known_again(steps: int) -> None:
    """However long it has trained: evidence is looked for after updates 1, 2, 4, ..., counted anew after a cast."""
    model = trained(steps).bfloat16()
    train(model, model, [DATA[5].bfloat16()])
    assert evidence(model) == dict.fromkeys(evidence(model), True)
    for layer in layers_of(model):
        assert layer.weight_scale.scale == exact_scale(layer)


# Other memory


def test_after_to_empty_of_a_real_model_its_new_weights_are_not_cast_with_the_old_scale() -> None:
    model = trained()
    kept, _ = split(state_of(model))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=5)
    now, _ = split(state_of(model))
    assert_same_bits(now, kept)
    assert_output_is_exact(model[0], DATA[3], now["0.input.scale"])
    stale = output(model[0], DATA[3], now["0.input.scale"], exact_scale(model[0]) * 100)
    assert (stale - output(model[0], DATA[3], now["0.input.scale"], exact_scale(model[0]))).abs().max() > 10


def built_on_meta(convert_on_meta: bool) -> nn.Module:
    with torch.device("meta"):
        model = mlp(K, N, K, config="delayed" if convert_on_meta else lambda linear, fqn: None)
    model.to_empty(device="cpu")
    f8.convert_to_float8_training(model, config="delayed")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:no layer was converted")
def test_from_meta_the_state_is_that_of_a_model_which_was_never_there() -> None:
    """Scenario 26. Memory that is filled with something else first would show what is taken from it."""
    states = []
    for convert_on_meta in (True, True, False):
        litter = [torch.full((1000,), math.pi) for _ in range(100)]
        del litter
        model = built_on_meta(convert_on_meta)
        assert not any(map(torch.any, state_of(model).values()))
        train(model, model, DATA[:2])
        assert {tensor.device.type for tensor in state_of(model).values()} == {"cpu"}
        states.append({**weights_of(model), **state_of(model)})
    for other in states[1:]:
        assert_same_bits(other, states[0])


def test_from_meta_too_it_warns_where_the_state_never_moves() -> None:
    """By a hook on a parameter, and there are other parameters than on meta."""
    model = built_on_meta(convert_on_meta=True)
    for _ in range(19):
        backward(model, DATA[0])
    with pytest.warns(UserWarning, match="20 backward passes through delayed scaling and no optimizer step"):
        backward(model, DATA[0])


def test_nobody_holds_the_state_on_meta() -> None:
    with torch.device("meta"):
        model = mlp(K, N, K)
    entries = [entry for layer in layers_of(model) for entry in scales_of(layer).values()]
    orphans = [weakref.ref(thing) for entry in entries for thing in (entry.scales, entry.scale, entry.amax)]
    assert all(entry.amax.is_meta for entry in entries)
    model.to_empty(device="cpu")
    gc.collect()
    assert [orphan() for orphan in orphans if orphan() is not None] == []
    assert not any(entry.amax.is_meta for entry in entries)


def test_a_part_of_a_model_may_be_elsewhere() -> None:
    """As in pipeline parallelism: the part that is there trains, with the one that isn't, or without."""
    with torch.device("meta"):
        model = mlp(K, N, K)
    first = model[0].to_empty(device="cpu")
    nn.init.normal_(first.weight)
    nn.init.zeros_(first.bias)
    alone = copy.deepcopy(first)
    for part, trains in ((first, model), (alone, alone)):
        optimizer = torch.optim.SGD(trains.parameters(), lr=1e-3)
        train(part, part, DATA[:3], optimizer)
    assert all(scales_of(first)[role].calibrated for role in scales_of(first))
    assert_same_bits(state_of(first), state_of(alone))
    assert all(entry.scale.is_meta for entry in scales_of(model[2]).values())


# Copies


def saved_and_loaded(thing: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved_and_loaded(model, weights_only=False),
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def addresses(model: nn.Module) -> set[int]:
    """Of every tensor of the state, and of the vectors behind them."""
    entries = [entry for layer in layers_of(model) for entry in scales_of(layer).values()]
    tensors = [t for entry in entries for t in (*entry.tensors().values(), entry.unscale, entry.scales.amax)]
    return {tensor.data_ptr() for tensor in tensors}


@every_copy
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_is_the_same_and_then_trains_on_its_own(steps: int, copied: Callable[[Any], Any]) -> None:
    model = trained(steps)
    other = copied(model)
    assert_same_bits(state_of(other), state_of(model))
    assert evidence(other) == evidence(model) == dict.fromkeys(evidence(model), steps > 0)
    assert torch.equal(other(DATA[3]), model(DATA[3]))
    assert addresses(other).isdisjoint(addresses(model))

    before = settled_state_of(model)
    train(other, other, DATA[4:7])
    assert_same_bits(settled_state_of(model), before)
    assert settled_state_of(other)["0.input.scale"] != before["0.input.scale"]

    train(model, model, DATA[4:7])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(other), **state_of(other)})


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, K) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def sharing() -> nn.Module:
    """q and k with one input scale, v with its own, after two steps."""
    model = f8.convert_to_float8_training(Projections(), config="delayed")
    model.k.input_scale = model.q.input_scale
    train(model, model, DATA[:2])
    return model


@every_copy
def test_what_shares_an_input_scale_shares_it_in_a_copy(copied: Callable[[Any], Any]) -> None:
    model = sharing()
    other = copied(model)
    assert other.k.input_scale is other.q.input_scale is not model.q.input_scale
    assert other.v.input_scale is not other.q.input_scale
    for each in (other, model):
        train(each, each, DATA[2:4])
    assert_same_bits(state_of(other), state_of(model))


@every_copy
def test_a_layer_that_is_copied_out_of_its_model_trains_alone(copied: Callable[[Any], Any]) -> None:
    model = trained()
    first, twin = copied(model[0]), copied(model[0])
    before = state_of(model)
    train(first, first, DATA[3:5])
    assert_same_bits(state_of(model), before)
    del model
    gc.collect()
    train(twin, twin, DATA[3:5])
    assert_same_bits(state_of(twin), state_of(first))
    assert settled_state_of(first)[".input.amax_history"][0] == DATA[4].abs().max()


# What is in a checkpoint

SHAPES = {
    "fp8_amax_input": (),
    "fp8_amax_history_input": (16,),
    "fp8_scale_input": (),
    "fp8_amax_grad_output": (),
    "fp8_amax_history_grad_output": (16,),
    "fp8_scale_grad_output": (),
    "fp8_scale_weight": (),
}


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_checkpoint_has_float8_experimentals_names_and_plain_float32_tensors(keep_vars: bool) -> None:
    model = trained()
    state = model[0].state_dict(prefix="layer.", keep_vars=keep_vars)
    mine = {key.removeprefix("layer."): tensor for key, tensor in state.items() if "fp8_" in key}
    assert {key: tuple(tensor.shape) for key, tensor in mine.items()} == SHAPES
    for key, tensor in mine.items():
        assert (type(tensor), tensor.dtype, tensor.requires_grad, tensor.is_contiguous()) == (Tensor, FP32, False, True)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "and nothing of other layers beside it"
        role = next(role for role in ("input", "grad_output", "weight") if key.endswith(role))
        assert torch.equal(tensor, getattr(scales_of(model[0])[role], key[4:].removesuffix(f"_{role}")))


def test_a_recipe_that_delays_only_some_operands_saves_only_theirs() -> None:
    dynamic = f8.Recipe.from_name("tensorwise")
    layer = f8.Float8Linear(
        K, N, recipe=replace(RECIPE, grad_input=dynamic.grad_input, grad_weight=dynamic.grad_weight)
    )
    assert [key for key in layer.state_dict() if key.startswith("fp8_")] == [*list(SHAPES)[:3], "fp8_scale_weight"]
    assert layer.grad_output_scale is None


def test_a_shared_input_scale_is_saved_for_each_layer_in_memory_of_its_own() -> None:
    """safetensors refuses tensors that share memory, and so does transformers' `save_pretrained`."""
    state = sharing().state_dict()
    assert torch.equal(state["k.fp8_scale_input"], state["q.fp8_scale_input"])
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)


def test_who_writes_into_a_state_dict_does_not_write_a_scale_without_its_reciprocal() -> None:
    """As timm's ModelEmaV3 averages: in place, all that the state dict has."""
    model = trained()
    average = copy.deepcopy(model)
    before, weight = state_of(average), average[0].weight.detach().clone()
    train(model, model, DATA[3:5])
    for of_average, of_model in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        of_average.lerp_(of_model, 0.5)
    assert not torch.equal(average[0].weight, weight), "weights it does average"
    assert_same_bits(state_of(average), before)


def test_it_loads_where_there_is_only_torch(tmp_path: Path) -> None:
    """Scenario 40."""
    model = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    printed = run_python(
        """
        import torch
        state = torch.load(sys.argv[1], weights_only=True)
        for key, t in state.items():
            print(key, type(t).__name__, t.dtype, *t.shape, float(t.double().sum()))
        """,
        str(tmp_path / "model.pt"),
        blocked=("float8_compile", "torchao"),
    )
    expected = [
        " ".join(map(str, (key, "Tensor", t.dtype, *t.shape, float(t.double().sum()))))
        for key, t in model.state_dict().items()
    ]
    assert printed.splitlines() == expected


# Loading it

TARGETS = {"afresh": 0, "after steps of its own": 2}
into = pytest.mark.parametrize("steps", TARGETS.values(), ids=TARGETS)
OTHERS: dict[str, Any] = {  # configs of the checkpoint's model
    "plain": lambda linear, fqn: None,
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
}


def other_model(config: Any) -> nn.Module:
    """Trained, with weights that are not those of `trained()`."""
    model = mlp(K, N, K, config=config)
    train(model, model, DATA[4:6])
    return model


@into
@pytest.mark.filterwarnings("ignore:no layer was converted")
@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_without_delayed_scales_in_a_checkpoint_they_start_afresh(config: Any, steps: int) -> None:
    """Scenario 41: plain and dynamic into delayed. But for a weight's scale, which is there with the weight."""
    model, source = trained(steps), other_model(config)
    loaded = model.load_state_dict(source.state_dict(), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert_same_bits(weights_of(model), weights_of(source))
    fresh = mlp(K, N, K)
    fresh.load_state_dict(source.state_dict())
    of_inputs, _ = split(state_of(model))
    assert not any(map(torch.any, of_inputs.values()))
    for layer in layers_of(model):
        assert layer.weight_scale.scale == exact_scale(layer)
    for each in (model, fresh):
        train(each, each, DATA[:2])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(fresh), **state_of(fresh)})


@into
@pytest.mark.parametrize("saved_after", [0, 3])
def test_from_delayed_to_delayed_every_number_goes_along(steps: int, saved_after: int) -> None:
    model, source = trained(steps), trained(saved_after)
    backward(source, 10 * DATA[3])  # running amaxes too
    loaded = model.load_state_dict(saved_and_loaded(source.state_dict()), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    of_inputs, expected = split(state_of(model))[0], split(state_of(source))[0]
    assert_same_bits(of_inputs, expected)
    assert evidence(model) == evidence(source)
    for each in (model, source):
        each.zero_grad()
        train(each, each, DATA[4:6])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_from_delayed_to_dynamic_the_scales_are_passed_over(recipe: str) -> None:
    source, model, other = trained(), mlp(K, N, K, config=recipe), mlp(K, N, K, config=recipe)
    loaded = model.load_state_dict(source.state_dict(), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    other.load_state_dict({name: tensor for name, tensor in source.state_dict().items() if "fp8_" not in name})
    assert torch.equal(model(DATA[0]), other(DATA[0]))
    assert state_of(model) == {}


@pytest.mark.parametrize(("saved", "own"), [(16, 4), (4, 16), (1, 3), (3, 1)])
def test_a_history_of_another_length_is_cut_or_padded(saved: int, own: int) -> None:
    """Scenario 43. The newest stay, zeros say nothing, and the next update follows the rule."""
    with_length = [replace(RECIPE, delayed=f8.DelayedScaling(history=length)) for length in (saved, own)]
    source, model = trained(6, config=with_length[0]), mlp(K, N, K, config=with_length[1])
    model.load_state_dict(source.state_dict(), strict=True)
    history = source[0].input_scale.amax_history.tolist()
    expected = (history + [0.0] * own)[:own]
    assert model[0].input_scale.amax_history.tolist() == expected
    assert any(expected[1:]) or own == 1 or saved == 1
    assert torch.equal(model[0].input_scale.scale, source[0].input_scale.scale)
    train(model, model, DATA[6:7])
    updated = delayed_update(expected, math.nan, DATA[6].abs().max().item(), E4M3)
    assert (model[0].input_scale.amax_history.tolist(), model[0].input_scale.scale.item()) == updated


def test_what_is_missing_or_odd_is_said_of_other_keys_only() -> None:
    """strict=False tells of them, and strict raises."""
    model, state = mlp(K, N, K), trained().state_dict()
    state["0.fp8_gate"] = torch.ones(3)
    del state["2.bias"], state["2.fp8_scale_input"]
    loaded = model.load_state_dict(state, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["2.bias"], ["0.fp8_gate"])
    assert evidence(model)["0.input"]
    assert not evidence(model)["2.input"], "amaxes without a scale are no evidence"
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"2.bias".*\n.*Unexpected key\(s\).*"0.fp8_gate"'):
        model.load_state_dict(state)


ODD_SHAPES = [
    ("fp8_scale_input", (2,)),
    ("fp8_scale_weight", (1, 1)),
    ("fp8_amax_input", (3,)),
    ("fp8_amax_history_input", (2, 16)),
]


@pytest.mark.parametrize(("key", "shape"), ODD_SHAPES)
def test_a_state_of_another_shape_is_refused_with_its_key(key: str, shape: tuple[int, ...]) -> None:
    model, state = mlp(K, N, K), trained().state_dict()
    state[f"2.{key}"] = torch.ones(shape)
    with pytest.raises(RuntimeError, match=rf"size mismatch for 2\.{key}: .*{shape[-1]}"):
        model.load_state_dict(state)


@pytest.mark.parametrize("number", [math.inf, math.nan], ids=str)
def test_numbers_that_are_not_finite_are_no_evidence_from_a_checkpoint_either(number: float) -> None:
    """float8_experimental takes them up into its history. A scale of 0 would be the end of a layer."""
    model, state = mlp(K, N, K), saved_and_loaded(trained().state_dict())
    state["0.fp8_amax_history_input"][1] = number
    state["2.fp8_scale_input"].fill_(number)
    expected = state["0.fp8_amax_history_input"].clone()
    expected[1] = 0
    model.load_state_dict(state)
    assert torch.equal(model[0].input_scale.amax_history, expected)
    assert not evidence(model)["2.input"]
    assert model(DATA[0]).isfinite().all()
    train(model, model, DATA[3:4])
    assert all(tensor.isfinite().all() for tensor in state_of(model).values())
    assert all(evidence(model).values())


@pytest.mark.parametrize("build", [trained, sharing], ids=["an MLP", "a shared scale"])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_ones_own_state_changes_nothing(build: Callable[[], nn.Module], assign: bool) -> None:
    model = build()
    backward(model, DATA[3])
    before, known = state_of(model), evidence(model)
    model.load_state_dict(model.state_dict(), assign=assign)
    assert_same_bits(state_of(model), before)
    assert evidence(model) == known


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assign_takes_the_checkpoints_weights_and_copies_its_scales(device: str) -> None:
    """Scales keep their addresses, which graphs know; and are nobody else's."""
    source = trained()
    state = source.state_dict()
    with torch.device(device):
        model = mlp(K, N, K)
    before = addresses(model)
    model.load_state_dict(state, strict=True, assign=True)
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()
    assert addresses(model).isdisjoint(addresses(source))
    assert device == "meta" or addresses(model) == before
    assert_same_bits(state_of(model), state_of(source))
    model.load_state_dict(saved_and_loaded(state), assign=True)  # weights of its own
    for each in (model, source):
        train(each, each, DATA[3:5])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(source), **state_of(source)})


@into
@pytest.mark.parametrize("assign", [False, True])
def test_a_weights_scale_is_that_of_the_loaded_weight_whatever_the_checkpoint_says(steps: int, assign: bool) -> None:
    """An average of checkpoints, or a merged adapter, has scales that are not its own."""
    model, state = trained(steps), saved_and_loaded(trained().state_dict())
    state["0.weight"].mul_(8)
    state["2.weight"].zero_()
    model.load_state_dict(state, assign=assign)
    assert model[0].weight_scale.scale == exact_scale(model[0])
    assert_output_is_exact(model[0], DATA[3], state["0.fp8_scale_input"])
    assert (model[2].weight_scale.scale, evidence(model)["2.weight"]) == (0, False)
    nn.init.normal_(model[2].weight)  # zeros are no evidence of what they will be
    hidden = torch.randn(16, N)
    assert_output_is_exact(model[2], hidden, state["2.fp8_scale_input"])


# Going on in a new process


GOES_ON = """
    import warnings, torch
    warnings.simplefilter("ignore")  # torch's own deprecations, while it compiles
    sys.path.insert(0, sys.argv[1])
    from delayed_checks import backward, batches, mlp, train
    saved = torch.load(sys.argv[2], weights_only=sys.argv[3] == "state dicts")
    model = saved["model"]
    if sys.argv[3] == "state dicts":
        model = mlp(32, 48, 32)
        model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    run = model if sys.argv[4] == "eager" else torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, run, batches(8, 16, 32)[3:6], optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("kind", "mode"), [("state dicts", "eager"), ("state dicts", "compiled"), ("the whole model", "eager")]
)
def test_six_steps_are_three_then_three_in_a_new_process(kind: str, mode: str, tmp_path: Path) -> None:
    """Scenario 42: weights, optimizer, amaxes, histories, scales."""
    model = mlp(K, N, K)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, model, DATA[:3], optimizer)
    backward(model, 10 * DATA[7])  # a microbatch that was not stepped with: running amaxes are saved, gradients not
    optimizer.zero_grad()
    saved = {"model": model if kind == "the whole model" else model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    train(model, model, DATA[3:6], optimizer)

    run_python(GOES_ON, str(Path(__file__).parent), str(tmp_path / "saved.pt"), kind, mode)
    other = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert_same_bits(other["model"], dict(model.state_dict()))
    ours, theirs = (
        {f"{number}.{name}": tensor for number, of_one in each["state"].items() for name, tensor in of_one.items()}
        for each in (optimizer.state_dict(), other["optimizer"])
    )
    assert_same_bits(theirs, ours)
    assert DATA[7].abs().max() * 10 in model[0].input_scale.amax_history


# Loading into what is compiled

# steps of the model before it loads, steps of the checkpoint's, compilations before, and after each of three steps
LOADS = {
    "hot into hot": (3, 3, 2, [2, 2, 2]),
    "hot into cold": (0, 3, 0, [1, 1, 1]),
    "cold into hot": (3, 0, 2, [2, 2, 2]),  # the first step's graph is there
    "plain into hot": (3, None, 2, [2, 2, 2]),
    "plain into cold": (0, None, 0, [1, 2, 2]),
}


@pytest.mark.parametrize(("own", "saved", "before", "after"), LOADS.values(), ids=LOADS)
def test_loading_into_a_compiled_model_compiles_nothing_that_a_new_one_would_not(
    own: int, saved: int | None, before: int, after: list[int]
) -> None:
    state = f8.plain_state_dict(trained()) if saved is None else trained(saved).state_dict()
    model, eager = mlp(K, N, K), mlp(K, N, K)
    run, counter = compile_counted(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    train(model, run, DATA[:own], optimizers[0])
    train(eager, eager, DATA[:own], optimizers[1])
    assert counter.frame_count == before
    counts = []
    for each in (model, eager):
        each.load_state_dict(saved_and_loaded(state))
    for x in DATA[3:6]:
        train(model, run, [x], optimizers[0])
        train(eager, eager, [x], optimizers[1])
        counts.append(counter.frame_count)
    assert counts == after
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(eager), **state_of(eager)})


def test_a_first_backward_before_plain_weights_are_loaded_costs_nothing_more() -> None:
    """The steady state is still the second graph, not the third."""
    model, plain = mlp(K, N, K), f8.plain_state_dict(trained())
    run, counter = compile_counted(model)
    backward(run, DATA[0])
    model.zero_grad()
    model.load_state_dict(plain)
    train(model, run, DATA[:3])
    assert counter.frame_count == 2


# Other ways of changing a weight


def in_place(layer: nn.Linear, w: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(w)


def by_average(layer: nn.Linear, w: Tensor) -> None:
    """What `AveragedModel` does with what it averages: here the layer is the average, of one model."""
    other = nn.Linear(K, N)
    other.weight.data.copy_(w)
    average = AveragedModel(nn.Identity())
    average.module = layer
    average.update_parameters(other)


def by_swap(layer: nn.Linear, w: Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(w.clone()))


def by_load(layer: nn.Linear, w: Tensor, **options: Any) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": w.clone()}, **options)


# how: whether it is seen at once
WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    "w.data.copy_": (lambda layer, w: layer.weight.data.copy_(w), False),
    "w.data = t": (lambda layer, w: setattr(layer.weight, "data", w.clone()), False),
    "w.copy_ under no_grad": (in_place, False),
    "w = another parameter": (lambda layer, w: setattr(layer, "weight", nn.Parameter(w.clone())), False),
    "swap_tensors": (by_swap, False),
    "an EMA copied in": (by_average, False),
    "load_state_dict": (by_load, True),
    "load_state_dict(assign=True)": (lambda layer, w: by_load(layer, w, assign=True), True),
    "to_empty and copy_": (lambda layer, w: layer.to_empty(device="cpu").weight.data.copy_(w), True),
}


@pytest.mark.parametrize(("mode", "then"), [("eager", "a step"), ("compiled", "an update by hand")])
@pytest.mark.parametrize(("change", "seen"), WAYS.values(), ids=WAYS)
def test_a_weight_that_is_changed_otherwise_saturates_until_it_is_measured(
    change: Callable[[Any, Tensor], Any], seen: bool, mode: str, then: str
) -> None:
    """Scenario 1. Eight times as large: finite in any case, and right after the next optimizer step or update."""
    layer = mlp(K, N)[0]
    train(layer, layer, DATA[:3])
    run, x = torch.compile(layer, backend="aot_eager") if mode == "compiled" else layer, DATA[3]
    run(x)
    (of_input, before), bias = (scales_of(layer)[role].scale.item() for role in ("input", "weight")), layer.bias.clone()
    w = 8 * layer.weight.detach().clone()
    change(layer, w)
    layer.bias.data.copy_(bias)
    assert torch.equal(layer.weight, w)

    used = exact_scale(layer) if seen else before
    y = run(x)
    torch.testing.assert_close(y.double(), output(layer, x, torch.tensor(of_input), used), rtol=1e-5, atol=1e-4)
    saturating = (w.abs() * used > LARGEST[E4M3] * 1.001).any()
    assert saturating == (not seen)

    if then == "an update by hand":
        f8.update_delayed_scaling(layer)
    else:
        torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert layer.weight_scale.scale == exact_scale(layer)
    assert torch.equal(layer.weight, w)
    with torch.no_grad():
        y = run(x)
    expected = output(layer, x, layer.input_scale.scale, exact_scale(layer))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("change", [change for change, _ in WAYS.values()], ids=WAYS)
def test_in_eval_a_weight_that_is_changed_otherwise_is_cast_by_its_own_scale(
    change: Callable[[Any, Tensor], Any], mode: str
) -> None:
    """Scenario 1: averaged weights are evaluated, and no optimizer ever steps them."""
    layer = mlp(K, N)[0]
    train(layer, layer, DATA[:3])
    run, x = torch.compile(layer, backend="aot_eager") if mode == "compiled" else layer, DATA[3]
    of_input, bias = layer.input_scale.scale.clone(), layer.bias.detach().clone()
    change(layer, 8 * layer.weight.detach().clone())
    layer.bias.data.copy_(bias)
    layer.eval()
    expected = output(layer, x, of_input, exact_scale(layer))
    torch.testing.assert_close(run(x).double(), expected, rtol=1e-5, atol=1e-4)


# Conversion back and forth, other recipes


def test_converted_back_and_forth_it_starts_afresh() -> None:
    model, fresh = trained(), mlp(K, N, K)
    weights = f8.plain_state_dict(model)
    assert not any(
        isinstance(value, DelayedScale) for value in vars(f8.convert_from_float8_training(model)[0]).values()
    )
    assert [key for key in model.state_dict() if "fp8_" in key] == []
    f8.convert_to_float8_training(model, config="delayed")
    assert not any(map(torch.any, state_of(model).values()))
    assert not any(evidence(model).values())
    fresh.load_state_dict(weights)
    for each in (model, fresh):
        train(each, each, DATA[3:6])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(fresh), **state_of(fresh)})


def test_converted_again_to_the_same_recipe_it_keeps_its_state() -> None:
    model = trained()
    before, entry = state_of(model), model[0].input_scale
    f8.convert_to_float8_training(model, config="delayed", recompute_weight_cast=False)
    assert model[0].input_scale is entry
    assert_same_bits(state_of(model), before)


@pytest.mark.parametrize(
    "change", [{"emulate": True}, {"name": "mine"}, {"output": replace(RECIPE.output, fast_accum=False)}]
)
def test_a_recipe_that_delays_the_same_casts_in_the_same_way_keeps_the_state(change: dict[str, Any]) -> None:
    model = trained()
    before, entry = state_of(model), model[0].weight_scale
    model[0].recipe = replace(RECIPE, **change)
    assert model[0].weight_scale is entry
    assert_same_bits(state_of(model), before)


OTHER_RECIPES = {
    "dynamic": f8.Recipe.from_name("rowwise"),
    "a shorter history": replace(RECIPE, delayed=f8.DelayedScaling(history=4)),
    "a margin": replace(RECIPE, delayed=f8.DelayedScaling(margin=1)),
    "dynamic gradients": f8.Recipe(
        RECIPE.output, f8.Gemm(f8.Cast(), RECIPE.output.right), f8.Gemm(f8.Cast(), f8.Cast())
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("other", OTHER_RECIPES.values(), ids=OTHER_RECIPES)
def test_another_recipe_may_be_set_at_any_time(other: f8.Recipe, compiled: bool) -> None:
    """What it delays starts afresh, and the layers beside it go on with theirs."""
    model, twin = trained(), trained()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    kept = {name: tensor for name, tensor in state_of(model).items() if name.startswith("2.")}
    model[0].recipe = other
    assert model[0].recipe == other
    assert_same_bits({name: tensor for name, tensor in state_of(model).items() if name.startswith("2.")}, kept)
    delayed = {role for role in ("input", "weight", "grad_output") if other.delayed_cast(role)}
    assert scales_of(model[0]).keys() == delayed
    assert not any(map(torch.any, state_of(model[0]).values()))

    train(model, run, DATA[3:6])
    assert all(evidence(model).values())
    if (entry := model[0].input_scale) is not None:
        largest = [x.abs().max().item() for x in (DATA[5], DATA[4], DATA[3])]
        assert entry.amax_history.tolist() == (largest + [0.0] * 16)[: other.delayed.history]

    model[0].recipe = RECIPE  # and back, from nothing
    twin.load_state_dict(f8.plain_state_dict(model))
    twin[2].load_state_dict(model[2].state_dict())
    for each in (model, twin):
        train(each, run if each is model else each, DATA[6:8])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(twin), **state_of(twin)})


# Out of others' reach, and within it


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_state_is_a_buffer_or_a_parameter() -> None:
    """So neither DDP's broadcast nor FSDP's buffer dtype knows of it, and no optimizer either."""
    model, plain = trained(), nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    assert list(model.named_buffers()) == []
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.usefixtures("_one_process_group")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo asks
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_under_ddp_it_trains_as_without(compiled: bool) -> None:
    model, twin = trained(), trained()
    wrapped = nn.parallel.DistributedDataParallel(model)
    train(model, torch.compile(wrapped, backend="aot_eager") if compiled else wrapped, DATA[3:6])
    train(twin, twin, DATA[3:6])
    assert_same_bits(state_of(model), state_of(twin))
    assert {key.removeprefix("module.") for key in wrapped.state_dict()} == twin.state_dict().keys()


@pytest.mark.usefixtures("_one_process_group")
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True, "cpu_offload": True}], ids=["as it is", "full"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.parallel.DistributedDataParallel], ids=["bare", "DDP"])
def test_torchs_distributed_checkpoints_have_it(options: dict[str, bool], wrap: Any, tmp_path: Path) -> None:
    """`get_model_state_dict` looks every key up as an attribute."""
    model, other = trained(), mlp(K, N, K)
    how = dcp_state_dict.StateDictOptions(**options)
    state = dcp_state_dict.get_model_state_dict(wrap(model), options=how)
    assert state.keys() == model.state_dict().keys()
    dcp.save(state, checkpoint_id=tmp_path)
    room = dcp_state_dict.get_model_state_dict(other, options=how)
    dcp.load(room, checkpoint_id=tmp_path)
    dcp_state_dict.set_model_state_dict(other, room, options=how)
    assert_same_bits(state_of(other), state_of(model))
    assert evidence(other) == evidence(model)


def test_an_attribute_for_each_key_and_no_other() -> None:
    model = mlp(K, N, K, config=lambda linear, fqn: "delayed" if fqn == "0" else "tensorwise")
    for key in SHAPES:
        assert torch.equal(getattr(model[0], key), model[0].state_dict()[key])
        assert not hasattr(model[2], key)
    assert not any(hasattr(model[0], key) for key in ("fp8_amax_weight", "fp8_amax_history_weight", "fp8_gate"))


# torch.nn.utils.parametrize


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def parametrized(steps: int = 3) -> nn.Module:
    model = trained(steps)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


def test_a_parametrized_layer_is_scaled_by_what_its_parametrization_gives() -> None:
    model = parametrized()
    train(model, model, DATA[3:5])
    assert isinstance(model[0], f8.Float8Linear)
    assert model[0].weight_scale.scale == exact_scale(model[0])
    assert model[0].input_scale.amax_history[0] == DATA[4].abs().max()
    assert_output_is_exact(model[0], DATA[5], model[0].input_scale.scale)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is f8.Float8Linear
    train(model, model, DATA[5:6])
    assert model[0].weight_scale.scale == exact_scale(model[0])


def test_a_parametrized_layer_saves_and_loads() -> None:
    model, other = parametrized(), parametrized(0)
    other.load_state_dict(saved_and_loaded(model.state_dict()), strict=True)
    assert_same_bits(state_of(other), state_of(model))
    for each in (model, other):
        train(each, each, DATA[3:5])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(other), **state_of(other)})


def test_a_copy_of_a_parametrized_layer_trains_on_its_own() -> None:
    """torch gives such a class a `__deepcopy__` that skips `__setstate__`, if it has none."""
    model = parametrized()
    other = copy.deepcopy(model)
    before = settled_state_of(model)
    train(other, other, DATA[3:5])
    assert_same_bits(settled_state_of(model), before)
    train(model, model, DATA[3:5])
    assert_same_bits({**weights_of(model), **state_of(model)}, {**weights_of(other), **state_of(other)})


def test_casts_of_a_parametrized_layer_pile_up_no_hooks() -> None:
    """Its weight is another tensor each time it is asked for; its parameters are the same ones."""
    model = parametrized()

    def hooks() -> int:
        return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())

    before = hooks()
    for dtype in (BF16, FP32) * 3:
        model.to(dtype)
    assert hooks() == before
