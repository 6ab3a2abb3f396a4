"""When a cast is made anew: inside of graphs, with delayed scales that move, and after a failure half-way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cache_checks import Twins, assert_equal, twins
from delayed_checks import backward, batches, layers_of
from test_weight_cache_writes import WRITES, Write
from torch import Tensor

import float8_compile as f8
from float8_compile import cached_weight
from float8_compile.delayed import cast_with

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


# How often


class Casts:
    """How many casts of weights are made inside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def cast(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return cast_with(*args, **kwargs)

        monkeypatch.setattr(cached_weight, "cast_with", cast)

    def since(self) -> int:
        """Since it was asked last."""
        count, self.count = self.count, 0
        return count


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_each_weight_is_cast_once_a_step(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the optimizer's hook. Two of the recipes cast a weight in two ways."""
    both = twins(32, 48, 40, config=lambda _, fqn: "tensorwise" if fqn == "0" else "rowwise", compiled=compiled)
    optimizer, casts = torch.optim.AdamW(both.cached.parameters(), lr=1e-2), Casts(monkeypatch)
    for _ in range(3):
        for x in batches(4, 8, 32):
            backward(both.run, x)
        assert casts.since() == 0
        optimizer.step()
        assert casts.since() == 3
        optimizer.zero_grad()


def test_only_what_was_written_to_is_cast_again_and_only_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    both = twins(32, 48, 40, config="tensorwise")
    casts, x = Casts(monkeypatch), batches(1, 8, 32)[0]
    for _ in range(3):
        both.cached[0].weight.data.mul_(2)
    assert casts.since() == 0
    both.cached(x)
    assert casts.since() == 1
    both.cached(x)
    assert casts.since() == 0
    both.handle.refresh()
    assert casts.since() == 2
    torch.optim.SGD(both.cached[2].parameters(), lr=0.1).step()
    assert casts.since() == 1
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert casts.since() == 0


# Inside of a graph

INSIDE: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad()(lambda w: w.mul_(0.5)),
    ".data": lambda w: w.data.mul_(0.5),
    "a view": torch.no_grad()(lambda w: w.t()[1:3].mul_(0.5)),
}


def forward_twice(model: Any, write: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Scenario 18, as one function."""

    def run(x: Tensor) -> Tensor:
        y = model(x)
        write(model[0].weight)
        return y + model(x)

    return run


def write_first(model: Any, write: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """As layers do that normalize or clamp their weight in forward."""

    def run(x: Tensor) -> Tensor:
        write(model[0].weight)
        return model(x)

    return run


@pytest.mark.parametrize("frame", [forward_twice, write_first])
@pytest.mark.parametrize("name", INSIDE)
def test_a_write_in_the_graph_that_reads_it_breaks_the_graph(name: str, frame: Any) -> None:
    """fullgraph=True says why it can't. The casts are asked for before a graph runs, so they can't follow inside."""
    both = twins(32, 48, config="tensorwise")
    run, plain = both.both(lambda model: frame(model, INSIDE[name]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cache_weight_casts"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(batches(1, 8, 32)[0])
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager")
    for x in batches(3, 8, 32):
        assert_equal(compiled(x), plain(x))


def test_a_write_behind_the_last_reader_of_a_graph_breaks_nothing() -> None:
    both = twins(32, 48, 40, config="tensorwise")

    def run(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        INSIDE["no_grad"](model[0].weight)
        return y

    compiled = torch.compile(lambda x: run(both.cached, x), backend="aot_eager", fullgraph=True)
    for x in batches(3, 8, 32):
        assert_equal(compiled(x), run(both.plain, x))


# Delayed scales


def written_and_updated(model: Any) -> None:
    WRITES[".data.copy_"](model)
    f8.update_delayed_scaling(model)


def reset_and_marked(model: Any) -> None:
    f8.reset_delayed_scaling(model)
    f8.mark_calibrated(model)


MOVES: dict[str, Write] = {
    "update_delayed_scaling": f8.update_delayed_scaling,
    "a write, then update_delayed_scaling": written_and_updated,
    "reset_delayed_scaling": f8.reset_delayed_scaling,
    "mark_calibrated": f8.mark_calibrated,
    "reset, then mark_calibrated": reset_and_marked,
    "a scale set by hand": lambda model: model[0].weight_scale.set_scale(torch.tensor(3.0)),
}


def calibrate(model: Any) -> None:
    with f8.calibrate(model):
        backward(model, batches(3, 8, 32)[2])
    model.zero_grad()


@pytest.mark.parametrize("known", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("name", [*MOVES, "calibrate"])
def test_a_scale_that_moves_takes_its_cast_along(name: str, known: bool) -> None:
    """A payload never stands without the scale that it was cast with."""
    both = twins(32, 48, 40, config="delayed")
    if known:
        both.both(WRITES["SGD"])
    both.assert_same_step()
    both.both(MOVES.get(name, calibrate))
    both.assert_same_step()
    for layers in zip(*both.both(layers_of), strict=True):
        layer = layers[0]
        output = layer.cached_weight.output
        assert torch.equal(output.unscale, output.scale.reciprocal())
        if layer.weight_scale.scale > 0:
            assert torch.equal(output.scale, layer.weight_scale.scale)


def test_so_it_does_in_a_graph() -> None:
    """All one after another; there are two graphs, with evidence and without."""
    both = twins(32, 48, 40, config="delayed", compiled=True)
    both.assert_same_step()
    both.both(WRITES["SGD"])
    for move in (*MOVES.values(), calibrate):
        both.both(move)
        both.assert_same_step()
    assert both.counter.frame_count == 2


# Half-way


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Inside, the cast number `at` raises, and those after it too."""
    calls = []

    def cast(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) >= at:
            raise MemoryError("half-way")
        return cast_with(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cached_weight, "cast_with", cast)
        yield
    assert len(calls) >= at


def by_forward(both: Twins) -> None:
    both.run(batches(1, 8, 32)[0])


def by_refresh(both: Twins) -> None:
    both.handle.refresh()


def by_the_optimizer(both: Twins) -> None:
    torch.optim.SGD(both.plain.parameters(), lr=0.0).step()
    torch.optim.SGD(both.cached.parameters(), lr=0.0).step()


def by_a_fused_optimizer(both: Twins) -> None:
    """Of whose writes only its hook tells, which fails."""
    WRITES["AdamW, fused"](both.plain)
    backward(both.cached, batches(2, 8, 32)[1])
    try:
        torch.optim.AdamW(both.cached.parameters(), lr=1e-2, fused=True).step()
    finally:
        both.cached.zero_grad()


WAYS = (by_forward, by_refresh, by_the_optimizer, by_a_fused_optimizer)
EAGERLY = [(refresh, at, False) for refresh in WAYS for at in (1, 2, 3)]


@pytest.mark.parametrize(("refresh", "at", "compiled"), [*EAGERLY, (by_forward, 2, True)])
def test_what_is_half_written_is_taken_by_nobody(
    refresh: Callable[[Twins], None], at: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = twins(32, 48, 40, config=lambda _, fqn: "rowwise" if fqn == "0" else "delayed", compiled=compiled)
    both.assert_same_outputs()
    both.both(WRITES[".data.copy_"])
    if refresh is by_a_fused_optimizer:
        both.assert_same_outputs()
    with failing(monkeypatch, at), pytest.raises(Exception, match="half-way"):
        refresh(both)
    both.assert_same_outputs()
    both.assert_same_step()
