"""What else writes to a weight than the optimizer: it is cast again before the next forward, eager and compiled."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_checks import Twins, casts_of, twins, twins_of
from delayed_checks import backward, batches, layers_of, mlp, plain_mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import float8_compile as f8

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
eagerly_and_traced = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
Write = Callable[[Any], Any]


def numbers_like(tensor: Tensor, seed: int = 0) -> Tensor:
    """Other numbers of this shape and dtype, the same each time; of another magnitude than a weight's."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tensor.shape, generator=generator) * 0.7).to(tensor.dtype)


def to_each_weight(write: Callable[[Any, Tensor], Any]) -> Write:
    def of_model(model: Any) -> None:
        for number, layer in enumerate(layers_of(model)):
            write(layer.weight, numbers_like(layer.weight, number))

    return of_model


def without_grad(write: Callable[[Any, Tensor], Any]) -> Write:
    return torch.no_grad()(to_each_weight(write))


def set_data(p: nn.Parameter, data: Tensor) -> Any:
    p.data = data


def set_item(p: Tensor, index: Any, numbers: Any) -> Any:
    p[index] = numbers


def by_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Write:
    def step(model: Any) -> None:
        optimizer = make(model.parameters())
        backward(model, batches(2, 8, 32)[1].to(next(model.parameters()).dtype))
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(model: Any) -> None:
    """Scenario 18's line."""
    backward(model, batches(2, 8, 32)[1])
    with torch.no_grad():
        for layer in layers_of(model):
            w: Any = layer.weight
            w -= 0.1 * w.grad
    model.zero_grad()


def other_state(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: t.clone() if "fp8" in name else numbers_like(t, len(name)) for name, t in state.items()}


def through_a_file(model: Any) -> None:
    file = io.BytesIO()
    torch.save(other_state(model), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def averaged(copy_in: Callable[[Any, list[Tensor]], Any]) -> Write:
    """An average of what the optimizer made is copied in."""

    def write(model: Any) -> None:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(2):
            WRITES["AdamW, fused"](model)
            average.update_parameters(model)
        copy_in(model, [p.detach().clone() for p in average.module.parameters()])

    return write


def from_masters(model: Any) -> None:
    """The optimizer holds float32 copies, and what it wrote is copied back."""
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for master, number in zip(masters, range(100), strict=False):
        master.grad = numbers_like(master, number)
    optimizer.step()
    torch._foreach_copy_([p.data for p in model.parameters()], [m.data for m in masters])


def onto_one_buffer(model: Any) -> None:
    """All parameters become parts of one vector, which is then written to."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    model(batches(1, 8, 32)[0])
    flat.mul_(1.5)


def initialized_anew(model: Any) -> None:
    torch.manual_seed(5)
    for layer in layers_of(model):
        layer.reset_parameters()


def replaced(model: Any) -> None:
    for layer in layers_of(model):
        layer.weight = nn.Parameter(numbers_like(layer.weight))


WRITES: dict[str, Write] = {
    "AdamW, fused": by_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "SGD": by_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2)),
    "by hand": by_hand,
    "copy_": without_grad(lambda w, t: w.copy_(t)),
    "copy_ under inference_mode": torch.inference_mode()(to_each_weight(lambda w, t: w.copy_(t))),
    "an element": without_grad(lambda w, t: set_item(w, (3, 3), 9.0)),
    "a view": without_grad(lambda w, t: w.t()[2:4].mul_(5)),
    "set_": without_grad(lambda w, t: w.set_(t)),
    "nn.init": torch.no_grad()(lambda model: [nn.init.constant_(layer.weight, 0.3) for layer in layers_of(model)]),
    "foreach": without_grad(lambda w, t: torch._foreach_lerp_([w], [t], 0.5)),
    ".data.copy_": to_each_weight(lambda w, t: w.data.copy_(t)),
    ".data, an element": to_each_weight(lambda w, t: set_item(w.data, (3, 3), 9.0)),
    ".data under inference_mode": torch.inference_mode()(to_each_weight(lambda w, t: w.data.copy_(t))),
    ".data =": to_each_weight(set_data),
    ".data = , and a write to that": to_each_weight(lambda w, t: (set_data(w, t), t.mul_(3))),
    "one buffer": onto_one_buffer,
    "clamped": to_each_weight(lambda w, t: w.data.clamp_(-0.05, 0.05)),
    "load_state_dict": lambda model: model.load_state_dict(other_state(model)),
    "load_state_dict through a file": through_a_file,
    "the tensors of a state_dict": lambda model: [
        tensor.copy_(numbers_like(tensor)) for name, tensor in model.state_dict().items() if "fp8" not in name
    ],
    "an average, through .data": averaged(
        lambda model, new: [p.data.copy_(t) for p, t in zip(model.parameters(), new, strict=True)]
    ),
    "an average, foreach": averaged(lambda model, new: torch._foreach_copy_([p.data for p in model.parameters()], new)),
    "an average, swapped in and out": averaged(
        lambda model, new: [set_data(p, t) for p, t in zip(model.parameters(), new, strict=True)]
    ),
    "float32 masters": from_masters,
    "reset_parameters": initialized_anew,
    ".float()": lambda model: model.float(),
    "requires_grad_": lambda model: model.requires_grad_(False).requires_grad_(True),
}  # fmt: skip

# These leave the parameter another object or dtype, of which a graph knows.
REPLACEMENTS: dict[str, Write] = {
    "load_state_dict, assign": lambda model: model.load_state_dict(other_state(model), assign=True),
    ".to(bfloat16)": lambda model: model.to(torch.bfloat16),
    ".half()": lambda model: model.half(),
    ".bfloat16().float()": lambda model: model.bfloat16().float(),
    "another parameter": replaced,
    "swap_tensors": to_each_weight(lambda w, t: torch.utils.swap_tensors(w, written_as_often(t, w))),
    "frozen": lambda model: model[2].requires_grad_(False),
}


def written_as_often(numbers: Tensor, weight: Tensor) -> nn.Parameter:
    """A parameter whose count of writes says no more than the weight's."""
    made = nn.Parameter(numbers)
    with torch.no_grad():
        while made._version < weight._version:
            made.add_(0)
    return made


def of_every_recipe(compiled: bool = False) -> Twins:
    """Some steps old, so that delayed scales are known."""
    both = twins(recompute=lambda _, fqn: int(fqn) % 4 == 0, compiled=compiled)
    both.both(WRITES["AdamW, fused"])
    both.assert_same_step()
    both.assert_same_outputs()
    return both


NEUTRAL = {".float()", "requires_grad_", "frozen"}  # no number changes; what they might lose is the cache


def write_to(both: Twins, write: Write, changes: bool = True) -> None:
    before = [layer.weight.detach().float().clone() for layer in layers_of(both.plain)]
    both.both(write)
    after = [layer.weight.detach().float() for layer in layers_of(both.plain)]
    assert any(torch.equal(*weights) for weights in zip(before, after, strict=True)) is not changes


@pytest.mark.parametrize("name", [*WRITES, *REPLACEMENTS])
def test_after_a_write_a_step_has_the_bits_of_no_cache(name: str) -> None:
    """Scenarios 1 and 18; also after the second such write, and the first one is no exception."""
    both, write = of_every_recipe(), (WRITES | REPLACEMENTS)[name]
    for again in (False, True):
        write_to(both, write, changes=name not in NEUTRAL and not (again and name in IDEMPOTENT))
        both.assert_same_step()
        both.assert_same_step()
        if name not in REPLACEMENTS:
            both.both(WRITES["SGD"])
            both.assert_same_step()


IDEMPOTENT = {".to(bfloat16)", ".half()", ".bfloat16().float()", "load_state_dict, assign", "another parameter"}
IDEMPOTENT |= {"swap_tensors"}


def test_so_it_is_in_one_graph_which_no_write_compiles_anew() -> None:
    both = of_every_recipe(compiled=True)
    compilations = both.counter.frame_count
    for name, write in WRITES.items():
        both.both(write)
        try:
            both.assert_same_step()
            both.assert_same_outputs()
        except AssertionError as error:
            raise AssertionError(f"after {name}: {error}") from error
        assert both.counter.frame_count == compilations, name


@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if name != "swap_tensors"])
def test_so_it_is_where_a_graph_may_be_compiled_anew(name: str) -> None:
    """torch swaps no tensor of which a graph knows."""
    both = twins(32, 48, 40, config=lambda _, fqn: "tensorwise" if fqn == "0" else "delayed", compiled=True)
    both.both(WRITES["SGD"])
    both.assert_same_step()
    write_to(both, REPLACEMENTS[name], changes=name not in NEUTRAL)
    both.assert_same_step()
    both.both(WRITES["SGD"])
    both.assert_same_step()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(WRITES)), min_size=2, max_size=6))
def test_after_any_writes_in_any_order(names: list[str]) -> None:
    both = of_every_recipe()
    for name in names:
        both.both(WRITES[name])
    both.assert_same_step()
    for name in names:
        both.both(WRITES[name])
        both.assert_same_outputs()


@eagerly_and_traced
def test_a_parameter_that_took_another_ones_place_is_cached_from_the_next_step_on(compiled: bool) -> None:
    """Until then the layer casts it itself."""
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    old = both.cached[0].weight
    both.both(REPLACEMENTS["another parameter"])
    assert not both.cached[0].cached_weight.holds(both.cached[0].weight)
    both.assert_same_step()
    both.both(WRITES["AdamW, fused"])
    assert both.cached[0].cached_weight.holds(both.cached[0].weight)
    assert type(old) is nn.Parameter
    both.assert_same_step()


@eagerly_and_traced
def test_a_weight_of_another_shape_gets_other_buffers(compiled: bool) -> None:
    """A vocabulary that grows."""
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    both.assert_same_step()

    def grow(model: Any) -> None:
        model[2].weight.data = numbers_like(torch.empty(56, 48))
        model[2].bias.data, model[2].out_features = numbers_like(torch.empty(56)), 56

    both.both(grow)
    both.assert_same_step()
    assert both.handle.nbytes == 48 * 32 + 56 * 48 + 2 * 2 * 4


# What nobody sees


@eagerly_and_traced
def test_after_a_write_that_nobody_sees_one_calls_refresh(compiled: bool) -> None:
    both = twins(32, 48, 40, config=lambda _, fqn: "rowwise" if fqn == "0" else "tensorwise", compiled=compiled)
    both.assert_same_outputs()
    both.both(to_each_weight(lambda w, t: w.detach().numpy().__imul__(3)))
    x = batches(1, 8, 32)[0]
    assert not torch.equal(both.run(x), both.plain(x)), "else there were nothing to refresh"
    both.handle.refresh()
    both.assert_same_step()


def test_a_copy_of_the_model_is_written_to_without_the_original_noticing() -> None:
    both = twins()
    copied = copy.deepcopy(both.cached)
    WRITES["copy_"](copied)
    both.assert_same_step()
    assert casts_of(copied) == []


def test_a_layer_outside_of_any_model_is_cached_too() -> None:
    both = twins_of(lambda: f8.convert_to_float8_training(plain_mlp(32, 48)[0]))
    for _ in range(2):
        both.both(lambda layer: layer.weight.data.mul_(2))
        both.assert_same_step()


def test_a_model_in_two_parts_with_a_cache_each() -> None:
    both = twins_of(lambda: nn.Sequential(mlp(32, 48), mlp(48, 32)))
    both.handle.remove()
    handles = [f8.cache_weight_casts(part) for part in both.cached]
    both.both(WRITES["AdamW, fused"])
    both.assert_same_step()
    handles[0].remove()
    assert len(casts_of(both.cached)) == 1
    both.both(WRITES[".data.copy_"])
    both.assert_same_step()
