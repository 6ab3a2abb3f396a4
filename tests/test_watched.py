"""A watched parameter tells of every write to it, and of no read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from float8_compile.watched import WatchedParameter, Watcher, watch

pytestmark = pytest.mark.usefixtures("afresh")

SHAPE = (4, 6)


def parameter(requires_grad: bool = True) -> nn.Parameter:
    """Distinct numbers, none of which is 0 or 1; the same each time."""
    return nn.Parameter(torch.arange(2.0, 26.0).view(SHAPE), requires_grad)


def nothing() -> None:
    """A watcher that has nothing to do."""


def watched(requires_grad: bool = True, watcher: Watcher = nothing) -> WatchedParameter:
    made = parameter(requires_grad)
    watch(made, watcher)
    assert isinstance(made, WatchedParameter)
    return made


# Writes


def compiled(function: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Any]:
    return lambda p: torch.compile(lambda: function(p), backend="aot_eager", fullgraph=True)()


def without_grad(function: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Any]:
    return torch.no_grad()(function)


def in_inference_mode(function: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Any]:
    return torch.inference_mode()(function)


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Parameter], Any]:
    def step(p: nn.Parameter) -> None:
        p.grad = torch.ones_like(p)
        make([p], lr=0.1, **options).step()

    return step


def set_item(p: Tensor, index: Any, value: float) -> None:
    p[index] = value


def set_data(p: nn.Parameter, data: Tensor) -> None:
    p.data = data


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": without_grad(lambda p: p.copy_(torch.ones(SHAPE))),
    "arithmetic": without_grad(lambda p: p.sub_(torch.ones(SHAPE), alpha=0.5)),
    "an element": without_grad(lambda p: set_item(p, (1, 2), 0.0)),
    "a mask": without_grad(lambda p: set_item(p, p > 9, 0.0)),
    "index_copy_": without_grad(lambda p: p.index_copy_(0, torch.tensor([1]), torch.ones(1, SHAPE[1]))),
    "a row": without_grad(lambda p: p[1].zero_()),
    "a view": without_grad(lambda p: p.view(-1)[3:5].zero_()),
    "a transposed view": without_grad(lambda p: p.t().mul_(2)),
    "detach": lambda p: p.detach().mul_(2),
    "set_": without_grad(lambda p: p.set_(torch.ones(SHAPE))),  # type: ignore[call-overload]
    "nn.init": lambda p: nn.init.normal_(p),
    "foreach": without_grad(lambda p: torch._foreach_mul_([p], 2.0)),
    "out=": without_grad(lambda p: torch.add(p.detach(), 1, out=p.detach())),
    "under inference_mode": in_inference_mode(lambda p: p.mul_(2)),
    ".data, copy_": lambda p: p.data.copy_(torch.ones(SHAPE)),
    ".data, arithmetic": lambda p: p.data.add_(1),
    ".data, an element": lambda p: set_item(p.data, (1, 2), 0.0),
    ".data, a view": lambda p: p.data.view(-1)[3:5].zero_(),
    ".data, a transposed view": lambda p: p.data.t().mul_(2),
    ".data, foreach": lambda p: torch._foreach_copy_([p.data], [torch.ones(SHAPE)]),
    ".data, out=": lambda p: torch.add(p.data, 1, out=p.data),
    ".data, under inference_mode": in_inference_mode(lambda p: p.data.mul_(2)),
    ".data = tensor": lambda p: set_data(p, torch.ones(SHAPE)),
    ".data = tensor of another dtype": lambda p: set_data(p, torch.ones(SHAPE).bfloat16()),
    ".data +=": lambda p: set_data(p, p.data.add_(1)),
    "vector_to_parameters": lambda p: vector_to_parameters(torch.ones(p.numel()), [p]),
    "SGD": step_of(torch.optim.SGD),
    "SGD, momentum, foreach": step_of(torch.optim.SGD, momentum=0.9, foreach=True),
    "AdamW": step_of(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": step_of(torch.optim.AdamW, foreach=True),
    "in a graph": compiled(without_grad(lambda p: p.mul_(2))),
    "in a graph, .data": compiled(lambda p: p.data.mul_(2)),
    "in a graph, .data, copy_": compiled(lambda p: p.data.copy_(torch.ones(SHAPE))),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str) -> None:
    p = watched()
    before, numbers = p.writes(), p.detach().clone()
    WRITES[name](p)
    assert not torch.equal(p.detach().float(), numbers), "else it were no write"
    assert p.writes() != before


@pytest.mark.parametrize("name", WRITES)
def test_each_write_is_seen_also_after_others(name: str) -> None:
    p = watched()
    seen = [p.writes()]
    for other in (".data, copy_", ".data = tensor", "copy_", ".data, arithmetic"):
        for write in (WRITES[other], WRITES[name]):
            write(p)
            seen.append(p.writes())
    assert len(set(seen)) == len(seen)


def test_a_write_through_an_alias_that_was_kept_is_seen_each_time() -> None:
    p = watched()
    first, second = p.data, p.data[1]
    seen = {p.writes()}
    for number, alias in enumerate((first, second, first, p.data), start=1):
        alias.add_(1)
        seen.add(p.writes())
        assert len(seen) == 1 + number


@pytest.mark.parametrize("again", ["p.data = p.data", "p.data = p", "a module's .float()"])
def test_an_alias_lasts_where_the_memory_stays(again: str) -> None:
    """`module.to(...)` sets `.data` also where there is nothing to do."""
    p = watched()
    module = in_a_module(p)
    alias = p.data
    if again == "p.data = p.data":
        p.data = p.data
    elif again == "p.data = p":
        p.data = p
    else:
        module.float()
    before = p.writes()
    alias.mul_(2)
    assert p.data_ptr() == alias.data_ptr()
    assert p.writes() != before


@pytest.mark.parametrize("read_before", [False, True])
def test_what_data_was_set_to_is_an_alias(read_before: bool) -> None:
    """One buffer under all parameters, an average swapped in: written to from outside."""
    p, flat = watched(), torch.ones(100)
    if read_before:
        assert p.data.sum() > 0
    p.data = flat[10 : 10 + p.numel()].view(SHAPE)
    before = p.writes()
    flat.mul_(2)
    assert torch.equal(p.detach(), torch.full(SHAPE, 2.0))
    assert p.writes() != before


def test_an_alias_of_what_was_there_before_counts_no_more() -> None:
    for write in (WRITES["set_"], WRITES[".data = tensor"]):
        p = watched()
        alias = p.data
        write(p)
        assert torch.equal(p.data, torch.ones(SHAPE))
        before = p.writes()
        alias.mul_(2)
        assert p.writes() == before
        p.data.mul_(2)
        assert p.writes() != before


SEVERAL = [name for name in WRITES if not name.startswith("in a graph") and "another dtype" not in name]


@given(st.lists(st.sampled_from(SEVERAL), max_size=8))
def test_no_two_states_of_a_history_look_alike(names: list[str]) -> None:
    p = watched()
    seen = {p.writes()}
    for name in names:
        WRITES[name](p)
        seen.add(p.writes())
    assert len(seen) == 1 + len(names)


def test_swapped_parameters_do_not_look_like_one_another() -> None:
    """What was written to as often as the other one."""
    first, second, third = watched(), watched(), parameter()
    seen = {first.writes()}
    torch.utils.swap_tensors(first, second)
    seen.add(first.writes())
    torch.utils.swap_tensors(first, third)
    watch(first, nothing)  # now one that nobody watched
    seen.add(first.writes())
    assert len(seen) == 3


NOT_SEEN: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "an alias from before": lambda p, alias: alias.mul_(2),
    "NumPy": lambda p, _: p.detach().numpy().fill(0),
    "DLPack": lambda p, _: torch.utils.dlpack.from_dlpack(p.detach()).mul_(2),
    "a storage": lambda p, _: p.untyped_storage().copy_(torch.zeros(SHAPE).untyped_storage()),
    "a fused optimizer": lambda p, _: step_of(torch.optim.AdamW, fused=True)(p),
    ".data of an alias": lambda p, _: p.detach().data.mul_(2),
}


@pytest.mark.parametrize("name", NOT_SEEN)
def test_what_can_not_be_seen_is_as_the_module_says(name: str) -> None:
    """A torch that counts one of these makes a sentence there untrue, and the cache simpler."""
    p = parameter()
    alias = p.data
    watch(p, nothing)
    assert isinstance(p, WatchedParameter)
    before, numbers = p.writes(), p.detach().clone()
    NOT_SEEN[name](p, alias)
    assert not torch.equal(p.detach(), numbers)
    assert p.writes() == before


# Reads


def saved(p: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    return buffer


def in_a_module(p: nn.Parameter) -> nn.Module:
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    module.weight = p
    return module


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    ".data": lambda p: p.data.sum(),
    ".data, kept": lambda p: (p.data, p.data.view(-1), p.data.t()),
    "detach": lambda p: p.detach().t()[1],
    "a norm": lambda p: p.norm(),
    "a comparison": lambda p: bool((p == p.data).all()),
    "numpy": lambda p: p.detach().numpy().sum(),
    "repr": repr,
    "state_dict": lambda p: in_a_module(p).state_dict(),
    "a copy into another": lambda p: parameter().data.copy_(p.data),
    "deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda p: copy.deepcopy(in_a_module(p)),
    "pickle": pickle.dumps,
    "torch.save": saved,
    "backward": lambda p: p.square().sum().backward(),
    "zero_grad": lambda p: torch.optim.SGD([p]).zero_grad(),
    "requires_grad_": lambda p: p.requires_grad_(False).requires_grad_(True),
    "a graph": lambda p: torch.compile(lambda: (p * 2).sum(), backend="aot_eager", fullgraph=True)().backward(),
    "a graph, .data": lambda p: torch.compile(lambda: p.data.sum(), backend="aot_eager", fullgraph=True)(),
    "under inference_mode": in_inference_mode(lambda p: (p.sum(), p.data.sum())),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_none(name: str) -> None:
    p = watched()
    before, numbers = p.writes(), p.detach().clone()
    READS[name](p)
    assert torch.equal(p.detach(), numbers)
    assert p.writes() == before


def test_data_is_what_it_is_of_a_plain_parameter() -> None:
    p, plain = watched(), parameter()
    for data in (p.data, plain.data):
        assert type(data) is Tensor
        assert (data.requires_grad, data.is_leaf, data.grad_fn, data._base) == (False, True, None, None)
    assert p.data is not p.data
    assert p.data.data_ptr() == p.data_ptr()
    p.data.requires_grad_()
    assert not p.data.requires_grad


def test_writes_through_data_are_none_of_autograds_business() -> None:
    """As ever: what a backward pass was handed may change behind its back. A write to the parameter itself may not."""
    for write, allowed in ((WRITES[".data, arithmetic"], True), (WRITES["arithmetic"], False)):
        p = watched()
        loss = p.square().sum()
        write(p)
        if allowed:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
