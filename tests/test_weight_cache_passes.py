"""A cache between forwards and backwards: evaluation, writes that come too early or too late, checkpoint regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_checks import Twins, assert_equal, buffers_of, train_in_microbatches, twins
from delayed_checks import (
    K,
    assert_same_bits,
    backward,
    batches,
    gradients_of,
    state_of,
)
from test_weight_cache_writes import WRITES
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import float8_compile as f8
from float8_compile.recompute import sac_save_ops

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
RECIPES = f8.Recipe.names()
eagerly_and_traced = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
recomputed_or_kept = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
Run = Callable[[Tensor], Tensor]
Frame = Callable[[Any, Run], Run]


def assert_same_training(both: Twins, frame: Frame = lambda model, run: run, **options: Any) -> None:
    """With the model run in a frame; weights, gradients, losses and delayed scales."""
    make = options.pop("make", lambda parameters: AdamW(parameters, lr=1e-2, fused=True))
    results = []
    for model, run in ((both.cached, both.run), (both.plain, both.plain)):
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        seen = train_in_microbatches(model, frame(model, run), optimizer, **{"steps": 2, "microbatches": 2, **options})
        results.append([*seen, state_of(model)])
    for of_cached, of_plain in zip(*results, strict=True):
        assert_same_bits(of_cached, of_plain)


# Passes in between


def in_eval(function: Callable[[Any, Run], Any]) -> Callable[[Any, Run], Any]:
    def run(model: Any, compiled: Run) -> None:
        model.eval()
        function(model, compiled)
        model.train()

    return run


def forward(_: Any, run: Run) -> None:
    run(1e4 * batches(1, 8, K)[0])


def disabled(model: Any, run: Run) -> None:
    with f8.float8_disabled(model):
        forward(model, run)


PASSES: dict[str, Callable[[Any, Run], Any]] = {
    "eval under no_grad": in_eval(torch.no_grad()(forward)),
    "eval under inference_mode": in_eval(torch.inference_mode()(forward)),
    "eval with gradients": in_eval(forward),
    "train under no_grad": torch.no_grad()(forward),
    "train under inference_mode": torch.inference_mode()(forward),
    "float8_disabled": torch.no_grad()(disabled),
}


def with_passes(passes: list[str], where: str) -> Frame:
    def frame(model: Any, run: Run) -> Run:
        def framed(x: Tensor) -> Tensor:
            y = run(x) if where == "before backward" else None
            for name in passes:
                PASSES[name](model, run)
            return run(x) if y is None else y

        return framed

    return frame


@pytest.mark.parametrize("where", ["before forward", "before backward"])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_in_between_changes_nothing(name: str, where: str) -> None:
    """The plain twin goes without."""
    both = twins(recompute=lambda _, fqn: int(fqn) % 4 == 0)
    frame = with_passes([name], where)
    assert_same_training(both, lambda model, run: frame(model, run) if model is both.cached else run)


def test_so_it_is_compiled() -> None:
    """All passes, between each forward and its backward; each is a graph of its own, once."""
    both = twins(32, 48, config="tensorwise", compiled=True)
    frame = with_passes(list(PASSES), "before backward")
    assert_same_training(both, lambda model, run: frame(model, run) if model is both.cached else run)
    compilations = both.counter.frame_count
    assert_same_training(both, lambda model, run: frame(model, run) if model is both.cached else run)
    assert both.counter.frame_count == compilations


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_cache_may_be_made_anywhere(context: Any) -> None:
    """And written anywhere: what it holds takes part in training either way."""
    both = twins(recompute=False)
    both.handle.remove()
    with context():
        f8.cache_weight_casts(both.cached)
    for _ in range(2):
        assert not any(tensor.is_inference() for tensor in buffers_of(both.cached))
        both.assert_same_step()
        both.both(WRITES[".data.copy_"])
        with context():
            both.assert_same_outputs()
        both.assert_same_step()


def test_in_eval_weights_are_cast_as_without_a_cache() -> None:
    """Of a delayed weight by its own amax, whatever its scale."""
    both = twins()
    both.both(WRITES["AdamW, fused"])
    both.both(lambda model: model[-1].weight_scale.set_scale(torch.tensor(1.0)))
    both.both(lambda model: model.eval())
    both.assert_same_step()


# A write between forward and backward


def gradients_after(model: Any, run: Run, write: Callable[[Any], Any]) -> dict[str, Tensor]:
    x = batches(1, 8, K)[0].requires_grad_()
    loss = run(x).square().sum()
    write(model)
    model.zero_grad()
    loss.backward()
    assert x.grad is not None
    return {**gradients_of(model), "the input": x.grad}


def stepped(make: Callable[..., Any], **options: Any) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        make(model.parameters(), lr=1e-2, **options).step()

    return step


STEPS = {"SGD": stepped(SGD), "AdamW, fused": stepped(AdamW, fused=True)}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("recipe", RECIPES)
@recomputed_or_kept
def test_backward_after_a_step_raises(name: str, recipe: str, recompute: bool) -> None:
    """The casts that forward used are gone. Without a cache this raises too where torch counts the writes and backward
    reads the weight; else it went on with a mixture of old and new (a fused optimizer), or with what was kept."""
    both = twins(32, 48, config=recipe, recompute=recompute)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_after(both.cached, both.run, STEPS[name])
    if name == "SGD" and recompute:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients_after(both.plain, both.plain, STEPS[name])
    else:
        gradients_after(both.plain, both.plain, STEPS[name])


@recomputed_or_kept
def test_compiled_it_does_too(recompute: bool) -> None:
    both = twins(recompute=recompute, compiled=True)
    for step in STEPS.values():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients_after(both.cached, both.run, step)
    both.both(lambda model: model.zero_grad())


@eagerly_and_traced
def test_after_another_write_backward_multiplies_with_what_forward_did(compiled: bool) -> None:
    """Until a forward has cast the weight again: then it raises."""
    both = twins(recompute=lambda _, fqn: int(fqn) % 4 == 0, compiled=compiled)
    expected = gradients_after(both.plain, both.plain, lambda model: None)
    assert_same_bits(gradients_after(both.cached, both.run, WRITES[".data.copy_"]), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_after(both.cached, both.run, lambda model: (WRITES["clamped"](model), both.run(batches(1, 8, K)[0])))


# Checkpoint


def by_policy(decide: Callable[[Any], CheckpointPolicy]) -> Frame:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: decide(op))
    return lambda model, run: lambda x: checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def saved_on_cpu(run: Run) -> Run:
    def framed(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(x)

    return framed


GEMMS = sac_save_ops()
REGIONS: dict[str, Frame] = {
    "checkpoint": lambda model, run: lambda x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda model, run: lambda x: checkpoint(run, x.clone().requires_grad_(), use_reentrant=True),
    "layer by layer": lambda model, run: (
        lambda x: functools.reduce(lambda h, layer: checkpoint(layer, h, use_reentrant=False), model, x)
    ),
    "a policy that saves GEMMs": by_policy(
        lambda op: CheckpointPolicy.MUST_SAVE if op in GEMMS else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "a policy that saves everything": by_policy(lambda op: CheckpointPolicy.MUST_SAVE),
    "a policy that saves nothing": by_policy(lambda op: CheckpointPolicy.MUST_RECOMPUTE),
    "saved on the CPU": lambda model, run: saved_on_cpu(run),
    "twice": lambda model, run: lambda x: run(run(x)),
}


@pytest.mark.parametrize("name", REGIONS)
def test_in_a_region_training_has_the_bits_of_no_cache(name: str) -> None:
    both = twins(recompute=lambda _, fqn: int(fqn) % 4 == 0)
    assert_same_training(both, REGIONS[name])


@pytest.mark.parametrize("name", REGIONS)
def test_so_it_has_where_a_weight_was_written_to_before(name: str) -> None:
    """Cast again inside of the region, whose modes see nothing of it."""
    both = twins()
    for write in ("copy_", ".data.copy_"):
        both.both(WRITES[write])
        region = Twins(both.cached, REGIONS[name](both.plain, both.plain), None, REGIONS[name](both.cached, both.run))
        x = batches(1, 8, K)[0].requires_grad_()
        losses = [backward(run, x) for run in (region.run, region.plain)]
        assert_equal(*losses)
        assert_same_bits(gradients_of(both.cached), gradients_of(both.plain))


@pytest.mark.parametrize("name", ["checkpoint", "a policy that saves nothing"])
def test_a_compiled_region_has_the_bits_of_no_cache(name: str) -> None:
    both = twins(32, 48, 32, config=lambda _, fqn: "rowwise" if fqn == "0" else "tensorwise")
    run = torch.compile(REGIONS[name](both.cached, both.cached), backend="aot_eager", fullgraph=True)
    assert_same_training(both, lambda model, plain: run if model is both.cached else REGIONS[name](model, plain))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_model_in_a_region_has_the_bits_of_no_cache(reentrant: bool) -> None:
    both = twins(32, 48, 32, config="tensorwise", compiled=True)
    assert_same_training(both, REGIONS["reentrant" if reentrant else "checkpoint"])


def test_a_nested_compile_region_has_the_bits_of_no_cache() -> None:
    both = twins(32, 32, 32, config="tensorwise", recompute=lambda _, fqn: fqn == "0")

    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return both.cached(x)

    run = torch.compile(lambda x: region(region(x)), backend="aot_eager", fullgraph=True)
    assert_same_training(both, lambda model, plain: run if model is both.cached else lambda x: plain(plain(x)))
