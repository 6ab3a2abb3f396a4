"""Ranks that do unequal work: no tokens, a layer left out, a NaN on one of them. Nothing hangs, nothing diverges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from delayed_checks import K, State, assert_same_bits, batches, layers_of, mlp, settled_state_of
from ranks import Ranks, rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import float8_compile as f8

RANKS = 2
WRAPPERS = ("ddp", "fsdp2", "fsdp2, float8 all-gather")


class Experts(nn.Module):
    """Two branches, of which a rank may leave out the second."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.both, self.some = mlp(K, 48, K, config=config), mlp(K, 40, K, config=config)

    def forward(self, x: Tensor, all_branches: bool = True) -> Tensor:
        return self.both(x) + (self.some(x) if all_branches else 0.0)


def wrapped(recipe: str, wrapper: str) -> tuple[Experts, Any]:
    config = replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather="all-gather" in wrapper)
    model = Experts(config)
    if wrapper == "ddp":
        return model, DistributedDataParallel(model, find_unused_parameters=True)
    # One group: FSDP2 gathers a group where its module is called, and who doesn't call it leaves the others waiting.
    run: Any = fully_shard(model)
    run.set_reduce_scatter_unused_params(True)
    return model, run


def numbers(model: nn.Module) -> State:
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {**{name: weight.detach().clone() for name, weight in whole.items()}, **settled_state_of(model)}


def train(recipe: str, wrapper: str, work: str) -> tuple[State, list[float]]:
    """Three steps; on rank 1 the second is another one. A step of which some rank knows that it is bad is skipped."""
    model, run = wrapped(recipe, wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for number, x in enumerate(batches(3, 8, K)):
        is_other = number == 1 and rank() == 1
        if is_other and work == "no tokens":
            x = x[:0]
        if is_other and work == "a NaN":
            x[3, 5] = math.nan
        loss = run(x, not (is_other and work == "a branch less")).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model), losses


@pytest.mark.parametrize("work", ["no tokens", "a branch less"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_ranks_that_work_unequally_agree(two: Ranks, recipe: str, wrapper: str, work: str) -> None:
    """On weights and scales, bitwise; and all of them are numbers."""
    (first, losses), (second, other_losses) = two(train, recipe, wrapper, work)
    assert_same_bits(first, second)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert losses[1] != other_losses[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_one_ranks_nan_is_every_ranks(two: Ranks, recipe: str, wrapper: str) -> None:
    """Its gradients reach all weights, as in any training; no scale and no history takes it up, and nobody hangs."""
    (first, losses), (second, other_losses) = two(train, recipe, wrapper, "a NaN")
    assert_same_bits(first, second)
    assert math.isfinite(losses[1])
    assert math.isnan(other_losses[1])
    assert math.isnan(losses[2])
    assert math.isnan(other_losses[2])
    assert all(t.isfinite().all() for name, t in first.items() if name.endswith(("_history", ".scale")))


def scales_of_gathered_weights() -> list[list[float]]:
    """Of a model whose ranks' shards differ by a factor of 100, and of its next step."""
    model, run = wrapped("tensorwise", "fsdp2, float8 all-gather")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100.0 if rank() else 1.0) if not isinstance(p, DTensor) else p.to_local().mul_(99.0 * rank() + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for x in batches(2, 8, K):
        run(x).square().mean().backward()
        found.append([layer.gather.scale.item() for layer in layers_of(model) if layer.gather is not None])
        optimizer.step()
    return found


def test_a_gathered_weight_has_one_scale_on_all_ranks(two: Ranks) -> None:
    first, second = two(scales_of_gathered_weights)
    assert first == second
    assert all(math.isfinite(scale) and scale > 0 for scales in first for scale in scales)
