"""Compiled with a cache: no graph casts a weight, and none is compiled more often than without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_checks import SHAPES, Twins, train_in_microbatches, twins, twins_of
from compile_checks import Graphs, graphs_of
from delayed_checks import backward, batches
from test_weight_cache import RECIPES, assert_same_training, fused_adamw, mixed, of_each_recipe, recomputed_or_kept
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import float8_compile as f8

# Dynamo asks an input that is no leaf for its gradient.
pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


# What is in them


def is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and (tuple(value.shape) in SHAPES or tuple(value.shape)[::-1] in SHAPES)


def work_on_weights(graphs: Graphs) -> dict[str, list[int]]:
    """Casts to float8 and magnitudes (of which amaxes are made) of tensors of a weight's shape: forward, backward."""
    counts = {"casts": [0, 0], "magnitudes": [0, 0]}
    for number, side in enumerate((graphs.forward, graphs.backward)):
        for node in (node for graph in side for node in graph.graph.nodes):
            if node.op == "call_function" and is_weight(node.meta.get("val")):
                value = node.meta["val"]
                becomes_float8 = value.dtype.itemsize == 1 and "convert_element_type" in str(node.target)
                counts["casts"][number] += becomes_float8
                counts["magnitudes"][number] += "aten.abs" in str(node.target)
    return counts


def graphs_of_a_step(model: Any) -> Graphs:
    x = torch.randn(16, 32, requires_grad=True)
    return graphs_of(lambda run: backward(run, x), model)


@recomputed_or_kept
@pytest.mark.parametrize("known", [False, True], ids=["first step", "calibrated"])
def test_no_graph_casts_a_weight_or_takes_its_amax_or_keeps_a_copy(recompute: bool, known: bool) -> None:
    """Every recipe in one graph. Of a weight's size backward is handed only what was there before."""
    graphs = graphs_of_a_step(twins(recompute=recompute, calibrated=known).cached)
    assert len(graphs.forward) == len(graphs.backward) == 1
    assert work_on_weights(graphs) == {"casts": [0, 0], "magnitudes": [0, 0]}
    assert not [tensor for tensor in graphs.saved() if is_weight(tensor)]


def test_without_a_cache_all_of_that_is_seen() -> None:
    graphs = graphs_of_a_step(twins(recompute=mixed).plain)
    work = work_on_weights(graphs)
    assert sum(work["casts"]) > len(RECIPES)
    assert sum(work["magnitudes"]) > len(RECIPES)
    assert [tensor for tensor in graphs.saved() if is_weight(tensor)]


# How many there are


@of_each_recipe
def test_20_steps_compile_once_and_with_delayed_scales_once_more(recipe: str) -> None:
    """After the first step, as without a cache."""
    both = twins(32, 48, config=recipe, compiled=True)
    assert compilations_of_20_steps(both) == [1] + [2 if recipe == "delayed" else 1] * 19


def test_what_was_compiled_before_it_was_cached_goes_on_as_if_made_so() -> None:
    both = twins(32, 48, config="tensorwise", compiled=True)
    both.handle.remove()
    assert compilations_of_20_steps(both) == [1] * 20
    f8.cache_weight_casts(both.cached)
    assert compilations_of_20_steps(both) == [2] * 20


def compilations_of_20_steps(both: Twins) -> list[int]:
    optimizer, counts = fused_adamw(both.cached.parameters()), []
    for _ in range(20):
        train_in_microbatches(both.cached, both.run, optimizer, steps=1, microbatches=2)
        counts.append(both.counter.frame_count)
    return counts


@pytest.mark.parametrize("how", ["mark_calibrated", "calibrate"])
def test_once_calibrated_delayed_scales_compile_once(how: str) -> None:
    both, x = twins(32, 48, 40, config="delayed", compiled=True), batches(1, 8, 32)[0]

    def calibrated(model: Any) -> None:
        if how == "mark_calibrated":
            f8.mark_calibrated(model)
        else:
            with f8.calibrate(model):
                backward(model, x)
            model.zero_grad()

    both.both(calibrated)
    assert_same_training(both, fused_adamw)
    assert both.counter.frame_count == 1


def test_equal_blocks_share_one_graph() -> None:
    """As without a cache; and each asks for its own weights."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    def made() -> Any:
        torch.manual_seed(0)
        return f8.convert_to_float8_training(nn.Sequential(*(Block() for _ in range(10))), config="tensorwise")

    both, counter = twins_of(made), CompileCounterWithBackend("aot_eager")
    for block in both.cached:
        block.compile(backend=counter, fullgraph=True)
    for number in range(10):
        for model in (both.cached, both.plain):
            model[number].linear.weight.data.mul_(1.5)
        both.assert_same_step()
    assert counter.frame_count == 1


def test_any_number_of_tokens_compiles_three_times() -> None:
    """As without: 16, any, 1."""
    both = twins(32, 48, config="tensorwise", compiled=True)
    for tokens in (16, 3, 1, 48, 2):
        both.assert_same_outputs(torch.randn(tokens, 32))
    assert both.counter.frame_count == 3
