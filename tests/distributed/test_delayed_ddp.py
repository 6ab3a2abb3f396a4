"""Delayed scales under DDP, in two gloo processes: the same on both ranks, in one all-reduce an optimizer step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from delayed_checks import (
    K,
    Run,
    State,
    assert_same_bits,
    backward,
    batches,
    evidence,
    mlp,
    settled_state_of,
    state_of,
    weights_of,
)
from oracles import E4M3, scale
from ranks import Ranks, counted_all_reduces, rank
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import float8_compile as f8

RANKS = 2


def ddp(model: nn.Module, compiled: bool = False, **options: Any) -> Run:
    """As people use it; with `compiled`, torch.compile around it, which splits the graph where a bucket ends."""
    torch._dynamo.reset()
    wrapped = DistributedDataParallel(model, **options)
    return torch.compile(wrapped, backend="aot_eager") if compiled else wrapped


def everything(model: nn.Module) -> State:
    return {**state_of(model), **weights_of(model)}


def steps(model: nn.Module, run: Run, data: list[Tensor], optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in data:
        backward(run, x)
        optimizer.step()
        optimizer.zero_grad()


# Scenario 4


def train_on_unequal_inputs(compiled: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1's are 100 times larger."""
    size = 100.0 if rank() else 1.0
    model = mlp(K, 512, 512, K) if "bucket_cap_mb" in options else mlp(K, 48, K)
    run = ddp(model, compiled, **options)
    with counted_all_reduces() as calls:
        steps(model, run, [x * size for x in batches(3, 8, K)])
    return {"state": everything(model), "calls": len(calls), "evidence": evidence(model)}


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        (False, {}),
        (False, {"bucket_cap_mb": 1}),
        (False, {"static_graph": True, "gradient_as_bucket_view": True}),
        (True, {}),
        (True, {"bucket_cap_mb": 1}),
    ],
    ids=str,
)
def test_both_ranks_scales_reflect_the_larger_inputs(two: Ranks, compiled: bool, options: dict[str, Any]) -> None:
    """Scenarios 4 and 37, with one all-reduce a step, by DDP's default arguments and with more than one bucket."""
    first, second = two(train_on_unequal_inputs, compiled, options)
    assert_same_bits(first["state"], second["state"])
    largest = 100 * max(x.abs().max().item() for x in batches(3, 8, K))
    assert first["state"]["0.input.scale"].item() == scale(largest, E4M3)
    assert first["calls"] == second["calls"] == 3
    assert all(first["evidence"].values())


def train_with_a_group_of_its_own() -> State:
    size = 100.0 if rank() else 1.0
    alone = [torch.distributed.new_group([r]) for r in range(RANKS)][rank()]
    recipe = f8.Recipe.from_name("delayed")
    model = mlp(K, 48, K, config=replace(recipe, delayed=f8.DelayedScaling(group=alone)))
    steps(model, ddp(model), [x * size for x in batches(3, 8, K)])
    return state_of(model)


def test_without_the_reduction_the_ranks_scales_differ(two: Ranks) -> None:
    """So the test above can fail: here each rank is a group of its own."""
    first, second = two(train_with_a_group_of_its_own)
    assert first["0.input.scale"] > 50 * second["0.input.scale"]


# Scenario 5


def train_through_a_bad_step(bad_rank: int | None, bad: float, where: str) -> dict[str, Any]:
    """Three steps, and between the second and the third one that overflows on one rank, and is skipped."""
    model = mlp(K, 48, K)
    run, optimizer = ddp(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second, third = ((1 + rank()) * x for x in batches(3, 8, K))
    steps(model, run, [first, second], optimizer)
    flags: dict[str, Any] = {}
    if bad_rank is not None:
        x = second / 100  # what is finite in the bad step counts, and is smaller than the next one's
        if where == "input" and rank() == bad_rank:
            x[0, 0] = bad
        y = run(x)
        g = torch.full_like(y, 1e-9)
        if where == "gradient" and rank() == bad_rank:
            g[0, 0] = bad
        y.backward(g)
        flags["seen"] = not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        before = settled_state_of(model)
        optimizer.zero_grad()
        assert_same_bits(settled_state_of(model), before)
    steps(model, run, [third], optimizer)
    return {"weights": weights_of(model), "state": settled_state_of(model), **flags}


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("bad_rank", range(RANKS))
@pytest.mark.parametrize("where", ["gradient", "input"])
def test_a_bad_number_on_one_rank_leaves_both_as_if_it_had_not_been(
    two: Ranks, where: str, bad_rank: int, bad: float
) -> None:
    """Scenario 5. gloo's MAX would lose a NaN of rank 1 and spread one of rank 0."""
    clean = two(train_through_a_bad_step, None, bad, where)
    first, second = two(train_through_a_bad_step, bad_rank, bad, where)
    assert first["seen"], "and the gradients that DDP averaged say so on both ranks"
    assert second["seen"]
    assert_same_bits(first["state"], second["state"])
    assert_same_bits(first["weights"], second["weights"])
    assert_same_bits({**first["state"], **first["weights"]}, {**clean[0]["state"], **clean[0]["weights"]})
    assert all(tensor.isfinite().all() for tensor in [*first["weights"].values(), *first["state"].values()])


def update_with(amaxes: list[float]) -> State:
    """An update of one layer, by hand, with this rank's running amax."""
    model = mlp(K, K)
    model[0].input_scale.amax.fill_(amaxes[rank()])
    f8.update_delayed_scaling(model)
    return state_of(model)


@pytest.mark.parametrize(
    ("amaxes", "newest"),
    [
        ([1.0, 2.0], 2.0),
        ([2.0, 1.0], 2.0),
        ([0.0, 3.0], 3.0),
        ([math.nan, 1.0], 0.0),
        ([1.0, math.nan], 0.0),
        ([math.nan, math.nan], 0.0),
        ([math.inf, math.nan], 0.0),
        ([1.0, math.inf], 0.0),
    ],
)
def test_every_rank_sees_the_same_amax(two: Ranks, amaxes: list[float], newest: float) -> None:
    """What is not finite on one rank is not finite on any."""
    first, second = two(update_with, amaxes)
    assert_same_bits(first, second)
    assert first["0.input.amax_history"].tolist() == [newest] + [0.0] * 15
    assert first["0.input.scale"].item() == (scale(newest, E4M3) if newest else 0)


# Optimizers that share their work


def train_with_a_shard_of_the_optimizer_each() -> dict[str, Any]:
    """ZeRO: each rank's own optimizer has some of the parameters, and is called by one that has all."""
    model = mlp(K, 48, 40, K)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2)
    with counted_all_reduces() as calls:
        steps(model, ddp(model), [x * (1 + 9 * rank()) for x in batches(3, 8, K)], optimizer)
    return {"state": everything(model), "calls": len(calls), "own": len(optimizer.optim.param_groups[0]["params"])}


def test_an_optimizer_that_calls_another_one_moves_scales_once(two: Ranks) -> None:
    """The ranks' own optimizers train different layers; what both see is the step around them."""
    first, second = two(train_with_a_shard_of_the_optimizer_each)
    assert first["own"] + second["own"] == 6
    assert_same_bits(first["state"], second["state"])
    assert all(tensor.count_nonzero() == 3 for name, tensor in first["state"].items() if name.endswith("amax_history"))
    assert first["calls"] == second["calls"] == 3


# Groups


def train_with_two_groups() -> dict[str, Any]:
    """Of the first layer's amaxes each rank knows its own; of the others' all ranks know all."""
    alone = [torch.distributed.new_group([r]) for r in range(RANKS)][rank()]
    together = torch.distributed.new_group(list(range(RANKS)))
    recipe = f8.Recipe.from_name("delayed")
    groups = {"0": alone, "2": together}

    def config(linear: nn.Module, fqn: str) -> f8.Recipe:
        return replace(recipe, delayed=f8.DelayedScaling(group=groups.get(fqn)))

    model = mlp(K, 48, 40, 48, K, config=config)
    with counted_all_reduces() as calls:
        steps(model, ddp(model), [x * (1 + rank()) for x in batches(2, 8, K)])
    return {"state": state_of(model), "calls": [(size, group is together) for size, group in calls]}


def test_two_groups_in_one_model_are_one_all_reduce_each(two: Ranks) -> None:
    first, second = two(train_with_two_groups)
    for name in first["state"]:
        if name.startswith("0.") and "weight" not in name:
            assert name.endswith(".amax") or not torch.equal(first["state"][name], second["state"][name])
        else:
            assert torch.equal(first["state"][name], second["state"][name]), name
    # a step: layer 2's three amaxes in its group, layers 4's and 6's in the default one, none for a group of one rank
    assert first["calls"] == second["calls"] == [(3, True), (6, False)] * 2


# What runs on one rank only


class Branches(nn.Module):
    """Rank 0 takes the one, rank 1 the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([mlp(K, K), mlp(K, K)])

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[rank()](x)


def train_branches() -> dict[str, Any]:
    model = f8.convert_to_float8_training(Branches(), config="delayed")
    run = ddp(model, find_unused_parameters=True)
    with counted_all_reduces() as calls:
        steps(model, run, batches(3, 8, K))
    return {"state": state_of(model), "weights": weights_of(model), "calls": len(calls)}


def test_a_layer_that_runs_on_one_rank_only_has_its_scales_on_both(two: Ranks) -> None:
    first, second = two(train_branches)
    assert_same_bits(first["state"], second["state"])
    assert_same_bits(first["weights"], second["weights"])
    assert all(first["state"][f"branches.{n}.0.input.scale"] > 0 for n in range(RANKS))
    assert first["calls"] == second["calls"] == 3


def train_two_models_in_turn() -> list[int]:
    """Two models, an optimizer each; and a garbage collector that may run at any time, on either rank."""
    models = [mlp(K, 48, K), mlp(K, 40, K)]
    runs = [ddp(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    with counted_all_reduces() as calls:
        for x in batches(2, 8, K):
            for run in runs:
                backward(run, x)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        f8.update_delayed_scaling(models[1])
    return [size for size, _ in calls]


def test_each_optimizers_step_reduces_its_own_layers(two: Ranks) -> None:
    assert two(train_two_models_in_turn) == [[6] * 5] * 2


# The ranks themselves: a test that hangs or fails must say so


def fail_on(bad_rank: int) -> int:
    if rank() == bad_rank:
        raise ValueError("on purpose")
    return rank()


def test_an_error_on_a_rank_is_an_error_here(two: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)ValueError: on purpose"):
        two(fail_on, 1)
