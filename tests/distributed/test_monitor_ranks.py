"""`monitor` on two ranks: each measures what it holds, and what it computes is what it would compute without."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from delayed_checks import assert_same_bits, backward, gradients_of, plain_mlp
from ranks import Ranks, rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8_compile as f8
from float8_compile.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

K, N, TOKENS, STEPS = 32, 48, 8, 2
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


def batch(of_rank: int) -> Tensor:
    return torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(of_rank))


def converted(recipe: str, gathers: bool = False) -> Any:
    config = replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=gathers)
    return f8.convert_to_float8_training(plain_mlp(K, N, K), config=config)


def trained(model: Any, run: Any, x: Tensor, on: bool) -> tuple[dict[str, Tensor], list[tuple[str, str, int]]]:
    """Two steps: losses and gradients of this rank, and of each row layer, operand and numbers."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    with f8.monitor(model) if on else contextlib.nullcontext() as seen:
        for step in range(STEPS):
            found[f"{step}.loss"] = backward(run, x)
            for name, gradient in gradients_of(model).items():
                found[f"{step}.{name}"] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            optimizer.step()
            optimizer.zero_grad()
    rows = () if seen is None else seen.rows
    # What was gathered in float8 by rows, and is cast again from that, loses nothing a second time.
    assert all(24 < (row.sqnr or 0) < 40 or (row.sqnr == math.inf and " for " in row.operand) for row in rows)
    return found, [(row.layer, row.operand, row.numbers) for row in rows]


def monitored_and_not(make: Any, x: Tensor, backend: str | None = None) -> list[tuple[str, str, int]]:
    answers = []
    for on in (True, False):
        torch.manual_seed(0)
        model = make()
        if backend:
            torch._dynamo.reset()
            for block in model:
                block.compile(backend=backend)
        answers.append(trained(model, model, x, on))
    assert_same_bits(answers[0][0], answers[1][0])
    return answers[0][1]


# FSDP2


def by_fsdp(recipe: str, gathers: bool, backend: str | None) -> list[tuple[str, str, int]]:
    def make() -> Any:
        model = converted(recipe, gathers)
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    return monitored_and_not(make, batch(rank()), backend)


@every_recipe
@pytest.mark.parametrize("gathers", [False, True], ids=["", "float8 all-gather"])
def test_under_fsdp2_a_gathered_weight_is_measured_where_it_is_in_high_precision(
    two: Ranks, recipe: str, gathers: bool
) -> None:
    for rows in two(by_fsdp, recipe, gathers, None):
        of_last = {operand: numbers for layer, operand, numbers in rows if layer == "2"}
        assert of_last["input"] == STEPS * TOKENS * N
        assert of_last["grad_output"] == STEPS * TOKENS * K
        assert of_last.get("weight") == (None if gathers else STEPS * N * K)


def test_compiled_by_block_too(two: Ranks) -> None:
    for rows in two(by_fsdp, "rowwise", True, "aot_eager"):
        assert {operand for _, operand, _ in rows} >= {"input", "input for grad_weight", "grad_output for grad_weight"}


# Tensor parallel

STYLES = {
    "whole tokens": (Float8ColwiseParallel(), Float8RowwiseParallel(), None),
    "split tokens": (
        Float8ColwiseParallel(input_layouts=Shard(0)),
        Float8RowwiseParallel(output_layouts=Shard(0)),
        None,
    ),
    "prepared": (
        Float8ColwiseParallel(),
        Float8RowwiseParallel(output_layouts=Shard(0)),
        PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    ),
    "torch's": (ColwiseParallel(), RowwiseParallel(), None),
}


class Block(nn.Sequential):
    """Two layers, of which the first is split by rows of its weight and the second by columns."""


def by_tensor_parallel(recipe: str, style: str) -> list[tuple[str, str, int]]:
    colwise, rowwise, prepare = STYLES[style]

    def make() -> Any:
        model, mesh = Block(*converted(recipe)), init_device_mesh("cpu", (2,))
        if prepare is not None:
            parallelize_module(model, mesh, prepare)
        return parallelize_module(model, mesh, {"0": colwise, "2": rowwise})

    whole = batch(0)
    return monitored_and_not(make, whole.chunk(2)[rank()] if style in ("split tokens", "prepared") else whole)


@every_recipe
@pytest.mark.parametrize("style", STYLES)
def test_under_tensor_parallelism_a_rank_measures_its_part(two: Ranks, recipe: str, style: str) -> None:
    if style == "torch's" and recipe == "delayed":
        pytest.skip("raises, monitored or not")
    for rows in two(by_tensor_parallel, recipe, style):
        numbers = {(layer, operand): n for layer, operand, n in rows}
        if style == "torch's":
            assert numbers == {}, "DTensors are left out"
            continue
        assert numbers["0", "weight"] == numbers["2", "weight"] == STEPS * K * N // 2
        gathers_in_high_precision = recipe == "rowwise_with_gw_hp"
        tokens = TOKENS // 2 if style == "split tokens" and not gathers_in_high_precision else TOKENS
        if style == "prepared" and not gathers_in_high_precision:
            assert ("0", "input") not in numbers, "it came in float8"
        else:
            assert numbers["0", "input"] == STEPS * tokens * K
        assert numbers["2", "input"] == STEPS * TOKENS * N // 2
