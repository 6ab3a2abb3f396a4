"""torch.distributed.checkpoint: saved by two FSDP2 processes, loaded by one, two and four, and trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from delayed_checks import K, State, assert_same_bits, batches, mlp, settled_state_of, train
from ranks import Ranks, ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import float8_compile as f8

BEFORE, AFTER = 3, 2  # steps


@pytest.fixture(scope="module", params=[1, 2, 4])
def loaders(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as started:
        yield started


def sharded(recipe: str, gather: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of 40 rows, which four processes share unequally."""
    model = mlp(K, 40, K, config=replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=gather))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for layer in model:
        if isinstance(layer, f8.Float8Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def numbers(model: nn.Module) -> State:
    """All weights, whole, and the delayed state."""
    weights = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {**{name: weight.detach().clone() for name, weight in weights.items()}, **settled_state_of(model)}


def save(folder: str, recipe: str, gather: bool) -> tuple[State, State, list[torch.Tensor]]:
    """What was saved, and what came of it after more steps."""
    model, optimizer = sharded(recipe, gather, seed=0)
    train(model, model, batches(BEFORE, 8, K), optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    saved = numbers(model)
    losses = train(model, model, batches(BEFORE + AFTER, 8, K)[BEFORE:], optimizer)
    return saved, numbers(model), losses


def load(folder: str, recipe: str, gather: bool) -> tuple[State, State, list[torch.Tensor]]:
    model, optimizer = sharded(recipe, gather, seed=1)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = numbers(model)
    losses = train(model, model, batches(BEFORE + AFTER, 8, K)[BEFORE:], optimizer)
    return loaded, numbers(model), losses


@pytest.mark.parametrize(
    ("recipe", "gather"),
    [("delayed", False), ("delayed", True), ("tensorwise", True), ("rowwise", True)],
)
def test_saved_by_two_processes_and_loaded_by_others(
    two: Ranks, loaders: Ranks, tmp_path: Path, recipe: str, gather: bool
) -> None:
    """Weights, scales and history, bitwise, and what they become: ranks read the same batches, so means are exact."""
    saved, later, losses = two(save, str(tmp_path), recipe, gather)[0]
    assert any("history" in name for name in saved) == (recipe == "delayed")
    for loaded, continued, their_losses in loaders(load, str(tmp_path), recipe, gather):
        assert_same_bits(loaded, saved)
        assert_same_bits(continued, later)
        assert their_losses == losses


def keys(folder: str) -> list[str]:
    return sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_a_gathered_weight_leaves_nothing_in_the_checkpoint(two: Ranks, tmp_path: Path) -> None:
    """It is a DTensor of plain numbers there: the keys are those of a model that runs in high precision."""
    two(save, str(tmp_path), "tensorwise", True)
    assert [key for key in keys(str(tmp_path)) if key.startswith("model.")] == [
        f"model.{layer}.{name}" for layer in (0, 2) for name in ("bias", "weight")
    ]


def load_plainly(folder: str) -> State:
    """By a process that knows of no float8 model: plain tensors of the shapes that it expects."""
    model = nn.Sequential(nn.Linear(K, 40), nn.GELU(), nn.Linear(40, K))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_plain_model_loads_its_weights(two: Ranks, loaders: Ranks, tmp_path: Path) -> None:
    saved, *_ = two(save, str(tmp_path), "delayed", True)[0]
    for loaded in loaders(load_plainly, str(tmp_path)):
        assert_same_bits(loaded, {name: saved[name] for name in loaded})
