"""A watched parameter is otherwise the parameter that it was, its copies are plain, and its watchers are asked."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from hypothesis import given
from hypothesis import strategies as st
from test_watched import SHAPE, in_a_module, nothing, parameter, saved, watched
from torch import Tensor, nn

from float8_compile.watched import WatchedParameter, Watcher, unwatch, watch

pytestmark = pytest.mark.usefixtures("afresh")

# Copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": lambda thing: torch.load(saved(thing), weights_only=True),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_plain_and_has_what_a_copy_of_a_plain_one_has(how: str, requires_grad: bool) -> None:
    """Of attributes of the user's too: torch's own deepcopy leaves them out, the others take them along."""
    copies = []
    for make in (parameter, watched):
        p = make(requires_grad)
        p.tag = ["the user's"]  # type: ignore[attr-defined]
        p.grad = torch.ones(SHAPE) if requires_grad else None
        copies.append(COPIES[how](p))
        assert (copies[-1].data_ptr() == p.data_ptr()) is (how == "copy")
    expected, actual = copies
    assert type(actual) is nn.Parameter
    assert actual.requires_grad is requires_grad
    assert torch.equal(actual, expected)
    assert vars(actual) == vars(expected) == ({} if how == "deepcopy" else {"tag": ["the user's"]})
    assert (actual.grad is None) is (expected.grad is None)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_tied_parameters_are_tied(how: str) -> None:
    p = watched()
    first, second = COPIES[how]([p, p])
    assert first is second
    assert type(first) is nn.Parameter


def test_the_original_is_still_watched_after_a_copy() -> None:
    p = watched()
    for make in COPIES.values():
        make(p)
        assert isinstance(p, WatchedParameter)
        before = p.writes()
        p.data.add_(1)
        assert p.writes() != before


def test_a_copy_is_no_alias() -> None:
    p = watched()
    copied, before = copy.deepcopy(p), p.writes()
    copied.data.zero_()
    assert p.writes() == before
    assert p.detach().all()


# The same parameter


def test_it_is_the_parameter_that_it_was() -> None:
    p = parameter()
    heard: list[Tensor] = []
    p.register_hook(heard.append)
    p.register_post_accumulate_grad_hook(heard.append)
    module, optimizer = in_a_module(p), torch.optim.AdamW([p], lr=0.1)
    before = (id(p), hash(p), p.data_ptr(), p._version, repr(p))
    watch(p, nothing)
    assert (id(p), hash(p), p.data_ptr(), p._version, repr(p)) == before
    assert isinstance(p, nn.Parameter)
    assert p.is_leaf
    assert next(module.parameters()) is p
    assert type(p * 2) is type(p.detach()) is type(p.clone()) is Tensor
    module(torch.ones(2, SHAPE[1])).sum().backward()
    optimizer.step()
    assert p in optimizer.state
    assert len(heard) == 2
    assert p.grad is not None


def test_unwatch_leaves_it_as_it_was_found() -> None:
    p = parameter()
    p.tag = "the user's"  # type: ignore[attr-defined]
    p.grad = torch.ones(SHAPE)
    before = dict(vars(p))
    watch(p, nothing)
    p.data.mul_(2)
    p.data = p.data.clone()
    p.other = "since then"  # type: ignore[attr-defined]
    unwatch(p, nothing)
    assert type(p) is nn.Parameter
    assert vars(p) == {**before, "other": "since then"}
    assert torch.equal(p.detach(), 2 * parameter().detach())
    assert torch.equal(p.grad, torch.ones(SHAPE))
    p.data = torch.ones(SHAPE)
    assert torch.equal(p.data, torch.ones(SHAPE))


@given(st.integers(1, 5))
def test_it_is_watched_as_long_as_one_of_its_watchers_is_there(count: int) -> None:
    """Tied weights have several."""
    p = parameter()
    asked: list[int] = []
    watchers: list[Watcher] = [functools.partial(asked.append, number) for number in range(count)]
    for watcher in watchers:
        watch(p, watcher)
    unwatch(p, nothing)
    for number, watcher in enumerate(watchers):
        assert isinstance(p, WatchedParameter)
        before = p.writes()
        p.data.add_(1)
        assert p.writes() != before
        asked.clear()
        assert p.watchers_asked
        assert asked == list(range(number, count))
        unwatch(p, watcher)
    assert type(p) is nn.Parameter
    unwatch(p, watchers[0])
    assert type(p) is nn.Parameter


def test_another_watcher_takes_nothing_for_unwritten() -> None:
    p = watched()
    alias, before = p.data, p.writes()
    watch(p, lambda: None)
    assert p.writes() == before
    alias.add_(1)
    assert p.writes() != before


def test_one_on_meta_has_no_memory_and_no_alias() -> None:
    p = nn.Parameter(torch.empty(SHAPE, device="meta"))
    watch(p, nothing)
    assert isinstance(p, WatchedParameter)
    assert p.data.is_meta
    before = p.writes()
    nn.init.ones_(p)
    assert p.writes() != before
    before = p.writes()
    p.data = torch.empty(SHAPE, device="meta")
    assert p.writes() != before
    assert repr(p) == repr(nn.Parameter(torch.empty(SHAPE, device="meta")))
    unwatch(p, nothing)
    assert type(p) is nn.Parameter


def test_an_assignment_that_torch_refuses_changes_nothing() -> None:
    p = watched()
    before = p.writes()
    with pytest.raises(RuntimeError):
        p.data = torch.ones(SHAPE, dtype=torch.int8)
    assert p.writes() == before
    assert torch.equal(p.detach(), parameter().detach())


# Under torch.compile


def test_it_trains_in_one_graph_to_the_same_bits() -> None:
    weights = []
    for watches in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if watches:
            for p in model.parameters():
                watch(p, nothing)
        run, counter = compile_counted(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(5):
            run(torch.full((4, 8), float(number))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert counter.frame_count == 1
        weights.append([p.detach() for p in model.parameters()])
    for actual, expected in zip(*weights, strict=True):
        assert torch.equal(actual, expected)


def test_a_graph_that_reads_data_beside_the_parameter_has_the_plain_ones_gradient() -> None:
    gradients: list[Any] = []
    for make in (parameter, watched):
        p = make()
        run, _ = compile_counted(lambda p=p: (p * p.data).sum())
        run().backward()
        gradients.append(p.grad)
    assert torch.equal(gradients[0], parameter().detach())
    assert torch.equal(gradients[1], gradients[0])


# Who watches is asked before each call


class Dependent:
    """A number in a tensor of its own, brought up to date when somebody asks the parameter."""

    def __init__(self) -> None:
        self.tensor, self.number, self.asked = torch.zeros(()), 1.0, 0
        self.fails: type[Exception] | None = None
        self.parameter = watched(watcher=self.bring_up_to_date)

    def bring_up_to_date(self) -> None:
        self.asked += 1
        if self.fails is not None:
            raise self.fails("out of reach")
        self.tensor.fill_(self.number)

    def plus(self, x: Tensor) -> Tensor:
        return x + self.tensor if self.parameter.watchers_asked else x


def test_a_graph_asks_before_each_call_and_then_sees_what_the_watcher_did() -> None:
    """The first call included. A property would be traced, and asked once."""
    dependent = Dependent()
    run, counter = compile_counted(dependent.plus)
    for number in range(1, 40):
        dependent.number, dependent.asked = float(number), 0
        assert run(torch.zeros(())) == number
        assert dependent.asked > 0
    assert counter.frame_count == 1


def test_eagerly_the_watcher_is_asked_each_time() -> None:
    dependent = Dependent()
    for number in (1.0, 2.0):
        dependent.number = number
        assert dependent.plus(torch.zeros(())) == number
    assert dependent.asked == 2


def test_nobody_is_asked_where_guards_are_skipped() -> None:
    dependent = Dependent()
    run, _ = compile_counted(dependent.plus)
    run(torch.zeros(()))
    dependent.number, dependent.asked = 2.0, 0
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        assert run(torch.zeros(())) == 1
    assert dependent.asked == 0
    assert run(torch.zeros(())) == 2


@pytest.mark.parametrize("error", [MemoryError, AttributeError])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_watcher_that_fails_is_heard(compiled: bool, error: type[Exception]) -> None:
    """And asked again the next time. An AttributeError does not say that there is no such attribute."""
    dependent = Dependent()
    run = compile_counted(dependent.plus)[0] if compiled else dependent.plus
    run(torch.zeros(()))
    dependent.fails, dependent.number = error, 5.0
    with pytest.raises(Exception, match="out of reach"):
        run(torch.zeros(()))
    dependent.fails = None
    assert run(torch.zeros(())) == 5


def test_objects_that_are_equal_share_one_graph() -> None:
    """Blocks of a model: a guard on who is asked would compile each anew."""
    run, counter = compile_counted(Dependent.plus)
    for number in range(12):
        dependent = Dependent()
        dependent.number = float(number)
        assert run(dependent, torch.zeros(())) == number
    assert counter.frame_count == 1
