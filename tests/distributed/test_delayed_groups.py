"""Who shares amaxes with whom: pipeline stages with other layers, and DDP with gradient accumulation."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from delayed_checks import (
    K,
    State,
    assert_same_bits,
    backward,
    batches,
    gradients_of,
    layers_of,
    mlp,
    settled_state_of,
    state_of,
    weights_of,
)
from oracles import E4M3, scale
from ranks import Ranks, counted_all_reduces, rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import float8_compile as f8

RANKS = 2


# Pipeline stages


def a_stage(widths: list[tuple[int, ...]], config: Any) -> nn.Module:
    """What rank r has of a model: its layers go by the names that they have in the whole."""
    names = f"stage{rank()}" if len(set(widths)) == 1 else "layers"
    model = nn.ModuleDict({names: mlp(*widths[rank()], config="tensorwise")})
    f8.convert_to_float8_training(model, config=config)
    return model


def step(model: nn.Module) -> None:
    (stage,) = model.children()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches(2, 8, K):
        backward(stage, x)
        optimizer.step()
        optimizer.zero_grad()


def share_with_another_stage(widths: list[tuple[int, ...]]) -> tuple[str, bool]:
    """The error, and whether every scale is as it was."""
    model = a_stage(widths, "delayed")
    before = settled_state_of(model)
    try:
        step(model)
    except RuntimeError as error:
        after = settled_state_of(model)
        return str(error), all(torch.equal(after[name], before[name]) for name in before)
    return "", False


@pytest.mark.parametrize(
    "widths",
    [[(K, 48, K), (K, 48, K)], [(K, 48, K), (K, 48, 40, K)], [(K, 48, K), (K, 40, K)]],
    ids=["other names", "more layers", "other shapes"],
)
def test_ranks_with_different_layers_are_told_so_instead_of_sharing_amaxes(
    two: Ranks, widths: list[tuple[int, ...]]
) -> None:
    for error, unmoved in two(share_with_another_stage, widths):
        assert "different layers with delayed scales" in error
        assert "DelayedScaling(group=...)" in error
        assert unmoved


def train_a_stage_with_its_group() -> dict[str, Any]:
    own = [torch.distributed.new_group([r]) for r in range(RANKS)][rank()]
    recipe = replace(f8.Recipe.from_name("delayed"), delayed=f8.DelayedScaling(group=own))
    model = a_stage([(K, 48, K), (K, 40, 56, K)], recipe)
    step(model)
    return {"state": state_of(model), "layers": len(layers_of(model))}


def test_a_group_for_each_stage_is_all_that_it_takes(two: Ranks) -> None:
    first, second = two(train_a_stage_with_its_group)
    assert (first["layers"], second["layers"]) == (2, 3)
    for answer in (first, second):
        assert all(number > 0 for name, number in answer["state"].items() if name.endswith(".scale"))


def count_checks(steps: int) -> list[int]:
    """How many all-reduces of integers, which are what the check is."""
    calls = []
    reduce = torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.is_floating_point())
        return reduce(tensor, *args, **kwargs)

    model = mlp(K, 72, K)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with mock.patch.object(torch.distributed, "all_reduce", counting):
        for x in batches(steps, 8, K):
            backward(model, x)
            optimizer.step()
    return [calls.count(False), calls.count(True)]


def test_ranks_compare_their_layers_once(two: Ranks) -> None:
    assert two(count_checks, 5) == [[1, 5]] * RANKS


def train_after_dropping(collects_on: int) -> dict[str, Any]:
    """A model with a frozen layer, which moves along with any optimizer, is dropped while it holds itself; on one rank
    that garbage is collected, on the other not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        dropped = mlp(K, 48, K)
        dropped[0].requires_grad_(False)
        dropped.itself = [dropped]
        del dropped
        if rank() == collects_on:
            gc.collect()
        model = mlp(K, 56, K)
        step(nn.Sequential(model))
        return state_of(model)
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("collects_on", range(RANKS))
def test_ranks_agree_whatever_their_garbage_collectors_did(two: Ranks, collects_on: int) -> None:
    first, second = two(train_after_dropping, collects_on)
    assert_same_bits(first, second)


# Gradient accumulation under DDP


def accumulate(compiled: bool, distributed: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of two microbatches, the same on each rank, the first of each in `no_sync`."""
    torch._dynamo.reset()
    model = mlp(K, 512, 512, K)
    run: Any = DistributedDataParallel(model, **options) if distributed else model
    function = torch.compile(run, backend="aot_eager") if compiled else run
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients: list[State] = []
    with counted_all_reduces() as calls:
        for one, other in zip(batches(3, 8, K), batches(6, 8, K)[3:], strict=True):
            with run.no_sync() if distributed else contextlib.nullcontext():
                backward(function, one)
            backward(function, other)
            gradients.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return {"state": state_of(model), "weights": weights_of(model), "gradients": gradients, "calls": len(calls)}


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        (False, {}),
        (False, {"bucket_cap_mb": 1}),
        (False, {"gradient_as_bucket_view": True}),
        (True, {"bucket_cap_mb": 1}),
    ],
    ids=str,
)
def test_microbatches_under_ddp_are_those_of_one_process(two: Ranks, compiled: bool, options: dict[str, Any]) -> None:
    """Bitwise, since the ranks' gradients are the same and their mean is exact; scenario 3 in `no_sync`."""
    first, second = two(accumulate, compiled, True, options)
    alone, _ = two(accumulate, compiled, False, {})
    for answer in (first, second):
        assert_same_bits(answer["state"], alone["state"])
        assert_same_bits(answer["weights"], alone["weights"])
        for actual, expected in zip(answer["gradients"], alone["gradients"], strict=True):
            assert_same_bits(actual, expected)
        assert answer["calls"] == 3
    largest = max(x.abs().max().item() for x in batches(6, 8, K))
    assert first["state"]["0.input.scale"].item() == scale(largest, E4M3)
