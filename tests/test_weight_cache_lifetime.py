"""How long a cache lives and what it leaves behind: nothing, at any time, and nothing of it is in a file or a copy."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cache_checks import assert_equal, assert_untouched, buffers_of, casts_of, twins, twins_of
from compile_checks import compile_counted
from delayed_checks import assert_same_bits, backward, batches, layers_of, mlp, plain_mlp, state_of, weights_of
from fresh_process import run_python
from test_weight_cache_writes import WRITES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize

import float8_compile as f8
from float8_compile import cached_weight

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
eagerly_and_traced = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
RECIPES = f8.Recipe.names()


def step(model: Any) -> None:
    WRITES["AdamW, fused"](model)


# The handle


@eagerly_and_traced
def test_remove_leaves_the_model_as_without_a_cache(compiled: bool) -> None:
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    both.assert_same_step()
    both.handle.remove()
    assert_untouched(both.cached)
    assert both.handle.nbytes == 0
    for write in (step, WRITES[".data.copy_"]):
        both.both(write)
        both.assert_same_step()
    both.handle.refresh()
    both.handle.remove()
    assert_untouched(both.cached)


def test_as_a_context_manager_it_is_there_inside() -> None:
    model = mlp(32, 48, config="tensorwise")
    with f8.cache_weight_casts(model) as handle:
        assert handle.nbytes > 0
        backward(model, batches(1, 8, 32)[0])
    assert_untouched(model)
    with pytest.raises(ZeroDivisionError), f8.cache_weight_casts(model):
        _ = 1 / 0
    assert_untouched(model)


def test_remove_frees_the_casts_at_once() -> None:
    """By reference counts alone, also after a backward."""
    both = twins()
    backward(both.cached, batches(1, 8, 32)[0])
    alive = [weakref.ref(tensor) for tensor in buffers_of(both.cached)]
    gc.collect()
    gc.disable()
    try:
        both.handle.remove()
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@eagerly_and_traced
def test_a_handle_that_is_dropped_takes_nothing_along(compiled: bool) -> None:
    both = twins(32, 48, 40, config="tensorwise", compiled=compiled)
    handle = weakref.ref(both.handle)
    del both.handle
    gc.collect()
    assert handle() is not None
    for write in (step, WRITES[".data.copy_"], step):
        both.both(write)
        both.assert_same_step()
    assert len(casts_of(both.cached)) == 2


def test_a_cache_goes_with_its_model() -> None:
    """By reference counts alone; a step of another model is then none of its business."""
    model, other = mlp(32, 48, config="tensorwise"), mlp(32, 48, config="tensorwise")
    handle = f8.cache_weight_casts(model)
    step(model)
    alive = [weakref.ref(thing) for thing in (model, *casts_of(model), *buffers_of(model))]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
    assert handle.nbytes == 0
    step(other)
    handle.refresh()
    handle.remove()


def test_a_layer_that_is_taken_out_goes_with_its_casts() -> None:
    both = twins()
    both.both(lambda model: model.pop(-1))
    gc.collect()
    assert both.handle.nbytes == sum(cast.nbytes for cast in casts_of(both.cached))
    both.both(step)
    both.assert_same_step()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_second_call_makes_the_casts_anew(recompute: bool) -> None:
    """For another `recompute_weight_cast`, say. The first handle then holds nothing."""
    both = twins(32, 48, 40, config="tensorwise", recompute=not recompute)
    first = both.handle.nbytes
    for layer in layers_of(both.cached):
        layer.recompute_weight_cast = recompute
    second = f8.cache_weight_casts(both.cached)
    assert second.nbytes == (first / 2 if recompute else first * 2)
    assert both.handle.nbytes == 0
    both.handle.remove()
    both.handle.refresh()
    assert second.nbytes > 0
    both.assert_same_step()
    second.remove()
    assert_untouched(both.cached)


# Copies and files

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: loaded(model, weights_only=False),
}


def loaded(thing: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_no_cache_and_trains_on_its_own(how: str) -> None:
    both = twins()
    both.both(step)
    copied = COPIES[how](both.cached)
    assert_untouched(copied)
    assert_same_bits(state_of(copied), state_of(both.plain))
    before = weights_of(both.cached)
    step(copied)
    assert_same_bits(weights_of(both.cached), before)
    both.assert_same_step()
    both.both(step)
    assert_same_bits(weights_of(both.cached), weights_of(copied))
    both.both(step)
    both.assert_same_step()
    assert len(casts_of(both.cached)) == len(RECIPES)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_file_holds_plain_tensors_and_nothing_of_the_cache(keep_vars: bool) -> None:
    both = twins()
    files = both.both(lambda model: loaded(model.state_dict(keep_vars=keep_vars), weights_only=True))
    assert_same_bits(*files)
    assert {type(tensor) for tensor in files[0].values()} == {Tensor} | ({nn.Parameter} if keep_vars else set())
    sizes = both.both(lambda model: len(pickle.dumps(model)))
    assert sizes[0] == sizes[1]


def test_a_process_that_knows_only_torch_reads_the_file(tmp_path: Any) -> None:
    both = twins(32, 48, config="delayed")
    torch.save(both.cached.state_dict(keep_vars=True), tmp_path / "state")
    code = f"import torch; print(*sorted(torch.load({str(tmp_path / 'state')!r}, weights_only=True)))"
    assert run_python(code, blocked=("float8_compile",)).split() == sorted(both.plain.state_dict())


# Back to plain layers


@eagerly_and_traced
def test_converting_back_removes_all_of_it(compiled: bool) -> None:
    model = mlp(32, 48, 40, config="delayed")
    optimizer, handle = torch.optim.AdamW(model.parameters(), lr=1e-2), f8.cache_weight_casts(model)
    run, _ = compile_counted(model) if compiled else (model, None)
    backward(run, batches(1, 8, 32)[0])
    optimizer.step()
    plain = plain_mlp(32, 48, 40)
    f8.convert_from_float8_training(model)
    plain.load_state_dict(model.state_dict())
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert_untouched(model)
    backward(run, batches(1, 8, 32)[0])
    optimizer.step()
    assert handle.nbytes == 0
    handle.refresh()
    handle.remove()
    model.load_state_dict(plain.state_dict())
    assert_equal(run(batches(1, 8, 32)[0]), plain(batches(1, 8, 32)[0]))


def test_a_model_that_was_converted_back_and_again_can_be_cached_again() -> None:
    both = twins(32, 48, 40, config="tensorwise")
    for function in (f8.convert_from_float8_training, f8.convert_to_float8_training):
        both.both(function)
    assert casts_of(both.cached) == []
    handle = f8.cache_weight_casts(both.cached)
    both.both(step)
    both.assert_same_step()
    handle.remove()
    assert_untouched(both.cached)


# On meta


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_meta_is_cached_where_it_goes(recipe: str) -> None:
    """Scenario 26: build, convert, cache, to_empty, initialise, step."""

    def made() -> Any:
        with torch.device("meta"):
            return f8.convert_to_float8_training(plain_mlp(32, 48, 40), config=recipe)

    both = twins_of(made)
    assert all(tensor.is_meta for tensor in buffers_of(both.cached))
    assert both.cached(torch.empty(8, 32, device="meta")).is_meta
    torch.optim.SGD(both.cached.parameters()).step()

    def initialized(model: Any) -> None:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in layers_of(model):
            layer.reset_parameters()

    both.both(initialized)
    for _ in range(2):
        both.assert_same_step()
        both.both(step)
    assert {tensor.device.type for tensor in buffers_of(both.cached)} == {"cpu"}
    assert len(casts_of(both.cached)) == 2


# What is refused


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class OwnParameter(nn.Parameter):
    """A subclass of the user's."""


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def sharded(layer: Any) -> None:
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]))


def parametrized(layer: Any) -> None:
    parametrize.register_parametrization(layer, "weight", Scaled())


def of_own_class(layer: Any) -> None:
    layer.weight = OwnParameter(layer.weight.detach())


@torch.inference_mode()
def made_in_inference_mode(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.clone())


REFUSED: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "sharded": (sharded, TypeError, r"layer '2': its weight is sharded \(DTensor\).*leave out cache_weight_casts"),
    "parametrized": (parametrized, TypeError, "layer '2': its weight is a Tensor.*leave this model uncached"),
    "a subclass": (of_own_class, TypeError, "layer '2': its weight is a OwnParameter.*only writes to a plain"),
    "inference": (made_in_inference_mode, RuntimeError, "layer '2': its weight was made under torch.inference_mode"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("_one_process_group")
def test_a_weight_that_can_not_be_watched_is_refused_and_nothing_has_changed(name: str) -> None:
    """The layer before it included."""
    change, error, message = REFUSED[name]
    model = mlp(32, 48, 40, config="tensorwise")
    change(model[2])
    before = [(type(parameter), list(vars(parameter))) for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        f8.cache_weight_casts(model)
    assert [(type(parameter), list(vars(parameter))) for parameter in model.parameters()] == before
    assert [layer.cached_weight for layer in layers_of(model)] == [None, None]


@pytest.mark.parametrize("what", ["cast_with", "_empty"])
@pytest.mark.parametrize("cached_before", [False, True])
def test_where_memory_runs_out_nothing_has_changed(
    what: str, cached_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second layer, in casting or in allocating. A cache that was there before stays."""
    both = twins(32, 48, 40, config="tensorwise")
    if not cached_before:
        both.handle.remove()
    function, calls = getattr(cached_weight, what), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no more")
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cached_weight, what, fails)
        with pytest.raises(MemoryError, match="no more"):
            f8.cache_weight_casts(both.cached)
    both.both(WRITES[".data.copy_"])
    both.assert_same_step()
    assert len(casts_of(both.cached)) == 2 * cached_before
    both.handle.remove()
    assert_untouched(both.cached)


def test_a_weight_that_is_computed_by_now_is_cast_by_its_layer() -> None:
    """A parametrization that came after the cache: steps, moves and files go on, and when it goes the cache is back."""
    both = twins(32, 48, 40, config="tensorwise")
    both.both(lambda model: parametrized(model[0]))
    for write in (step, lambda model: model.float(), WRITES["SGD"]):
        both.both(write)
        both.assert_same_step()
    both.cached.load_state_dict(both.plain.state_dict())
    both.both(lambda model: parametrize.remove_parametrizations(model[0], "weight"))
    both.both(step)
    assert both.cached[0].cached_weight.holds(both.cached[0].weight)
    both.assert_same_step()
