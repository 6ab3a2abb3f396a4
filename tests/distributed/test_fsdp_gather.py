"""Weights that FSDP2 gathers in float8, on two and three ranks: bitwise a model in one process, a quarter of the bytes.

The other half, in one process, is tests/test_gathered_weight.py.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from delayed_checks import State, assert_same_bits, backward
from fresh_process import run_python
from ranks import Ranks, counted_all_reduces, rank
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import float8_compile as f8
from float8_compile.delayed import cast_with

K, N, TOKENS, STEPS = 48, 64, 8, 3
RECIPES = f8.Recipe.names()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# The model


def net(n: int = N, bias: bool = True, blocks: int = 2, device: str = "cpu") -> nn.Sequential:
    """Some blocks, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(K, n, bias), nn.GELU(), nn.Linear(n, K, bias)) for _ in range(blocks)]
        )


def gathering(recipe: str) -> f8.Recipe:
    return replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=True)


def sharded(model: Any, recipe: Any, backend: str | None = None, first: str = "shard", **options: Any) -> Any:
    """The model converted, each block and the rest a group of FSDP2, compiled block by block."""
    f8.convert_to_float8_training(model, config=gathering(recipe) if isinstance(recipe, str) else recipe)
    steps = {
        "shard": lambda block: fully_shard(block, **options),
        "compile": lambda block: block.compile(backend=backend) if backend else None,
    }
    if backend:
        torch._dynamo.reset()
    for block in model:
        for step in sorted(steps, key=lambda step: step != first):
            steps[step](block)
    return fully_shard(model, **options)


def batch(step: int, microbatch: int, of_rank: int) -> Tensor:
    """Of another magnitude each time, so that delayed scales have something to follow."""
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + of_rank)
    return torch.randn(TOKENS, K, generator=generator) * (1 + step + 3 * microbatch + 2 * of_rank)


def whole(model: nn.Module, gradients: bool = False) -> State:
    """Every parameter, or its gradient, put together from all ranks. Collective."""
    tensors = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in tensors.items()}


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {fqn: layer for fqn, layer in model.named_modules() if isinstance(layer, f8.Float8Linear)}


def gathered(model: nn.Module) -> State:
    """What the next all-gather of each weight brings: its bytes and its scale."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    found = {}
    for fqn, layer in layers_of(model).items():
        operand = layer.gather.operand(layer.weight)
        found[f"{fqn}.payload"] = operand.payload.view(torch.uint8).clone()
        found[f"{fqn}.scale"], found[f"{fqn}.unscale"] = operand.scale.clone(), operand.unscale.clone()
    for group in groups:
        group.reshard()
    return found


def exact(model: nn.Module) -> State:
    """What it should bring: the cast of the whole weight, as one process makes it."""
    weights, found = whole(model), {}
    for fqn, layer in layers_of(model).items():
        operand = cast_with(weights[f"{fqn}.weight"], layer.recipe.output.right, None)
        found[f"{fqn}.payload"] = operand.payload.view(torch.uint8)
        found[f"{fqn}.scale"], found[f"{fqn}.unscale"] = operand.scale, operand.unscale
    return found


# Training: what one process does without sharding


def train(model: Any, batch_of: Callable[[int, int], Tensor], microbatches: int, optimizer: Any = None) -> State:
    """Losses, gradients and weights of some steps on this rank's batches."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    for step in range(STEPS):
        for microbatch in range(microbatches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(microbatch == microbatches - 1)
            seen[f"{step}.{microbatch}.loss"] = backward(model, batch_of(step, microbatch))
        seen.update({f"{step}.gradient.{name}": t for name, t in whole(model, gradients=True).items()})
        optimizer.step()
        optimizer.zero_grad()
        seen.update({f"{step}.weight.{name}": t for name, t in whole(model).items()})
    return seen


def train_alone(model: Any, of_ranks: list[int], mine: int, microbatches: int) -> State:
    """The same for these ranks' batches one after the other, with the gradients' average, and the losses of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    for step in range(STEPS):
        sums = []
        for of_rank in of_ranks:
            for microbatch in range(microbatches):
                loss = backward(model, batch(step, microbatch, of_rank))
                if of_rank == mine:
                    seen[f"{step}.{microbatch}.loss"] = loss
            sums.append(whole(model, gradients=True))
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = sum(each[name] for each in sums) / len(of_ranks)
        seen.update({f"{step}.gradient.{name}": t for name, t in whole(model, gradients=True).items()})
        optimizer.step()
        optimizer.zero_grad()
        seen.update({f"{step}.weight.{name}": t for name, t in whole(model).items()})
    return seen


def both(recipe: str, backend: str | None, first: str, bias: bool, microbatches: int, same: bool) -> tuple[State, ...]:
    """On ranks and in one process; then what the next gather brings, and what it should."""
    blocks = 1 if backend else 2  # compiling takes its time
    model, alone = net(bias=bias, blocks=blocks), net(bias=bias, blocks=blocks)
    sharded(model, recipe, backend, first)
    f8.convert_to_float8_training(alone, config=recipe)
    mine = 0 if same else rank()
    ours = train(model, lambda step, microbatch: batch(step, microbatch, mine), microbatches)
    theirs = train_alone(alone, [0] if same else list(range(torch.distributed.get_world_size())), mine, microbatches)
    return ours, theirs, gathered(model), exact(model)


def assert_as_in_one_process(answers: list[tuple[State, ...]]) -> None:
    for ours, theirs, brought, expected in answers:
        assert_same_bits(ours, theirs)
        assert_same_bits(brought, expected)
        assert_same_bits(brought, answers[0][2])
    losses = [t for name, t in answers[0][0].items() if "loss" in name]
    assert len({loss.item() for loss in losses}) == len(losses), "each step is another one, or nothing was trained"


@pytest.mark.parametrize(
    ("bias", "microbatches", "same"),
    [(True, 2, False), (False, 1, True), (True, 1, False)],
    ids=["bias, 2 microbatches, batch per rank", "no bias, same batch", "bias, batch per rank"],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_eagerly_bitwise_as_in_one_process(two: Ranks, recipe: str, bias: bool, microbatches: int, same: bool) -> None:
    """Losses, gradients and weights of three steps of AdamW; of two ranks' gradients the average is exact too."""
    assert_as_in_one_process(two(both, recipe, None, "shard", bias, microbatches, same))


@pytest.mark.parametrize(
    ("recipe", "first", "bias", "microbatches", "same"),
    [
        ("tensorwise", "shard", True, 2, False),
        ("delayed", "shard", False, 1, True),
        ("delayed", "compile", True, 2, False),
        ("rowwise", "compile", True, 1, True),
        ("rowwise_with_gw_hp", "shard", True, 2, False),
    ],
    ids=str,
)
def test_compiled_block_by_block_bitwise_as_in_one_process(
    two: Ranks, recipe: str, first: str, bias: bool, microbatches: int, same: bool
) -> None:
    """Compiled before fully_shard, as torchtitan does it, and after."""
    assert_as_in_one_process(two(both, recipe, "aot_eager", first, bias, microbatches, same))


# Uneven and empty shards


def only_the_first_rank_has_a_loss(recipe: str, n: int) -> tuple[State, ...]:
    """So that the ranks' sum is exact: a third of it is not, of three that are alike."""
    model, alone = sharded(net(n), recipe), f8.convert_to_float8_training(net(n), config=recipe)
    ranks, seen = torch.distributed.get_world_size(), ({}, {})
    rows = [p.to_local().shape[0] for name, p in model.named_parameters() if name == "0.0.weight"]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    for step in range(STEPS):
        for run, optimizer, found in zip((model, alone), optimizers, seen, strict=True):
            loss = run(batch(step, 0, 0)).square().sum()
            (loss if run is alone or rank() == 0 else 0 * loss).backward()
            if run is alone:
                for parameter in alone.parameters():
                    parameter.grad /= ranks
            found[f"{step}.loss"] = loss.detach()
            found.update({f"{step}.gradient.{name}": t for name, t in whole(run, gradients=True).items()})
            optimizer.step()
            optimizer.zero_grad()
            found.update({f"{step}.weight.{name}": t for name, t in whole(run).items()})
    return *seen, gathered(model), exact(model), {"rows": torch.tensor(rows)}


@pytest.mark.parametrize(("count", "n", "rows"), [(3, 32, [11, 11, 10]), (3, 2, [1, 1, 0]), (2, 5, [3, 2])], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_uneven_and_empty_shards_are_bitwise_as_in_one_process(
    two: Ranks, three: Ranks, recipe: str, count: int, n: int, rows: list[int]
) -> None:
    """Scenario 44. `n` is the out_features of the blocks' first layer and the in_features of their second."""
    answers = (two if count == 2 else three)(only_the_first_rank_has_a_loss, recipe, n)
    assert [answer[4]["rows"].item() for answer in answers] == rows
    assert_as_in_one_process([answer[:4] for answer in answers])


# What goes over the wire


class Counted:
    """FSDP2's all-gather, with the dtype and the bytes that this rank sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[torch.dtype, int]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent.append((input_tensor.dtype, input_tensor.numel() * input_tensor.element_size()))
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def counts(recipe: str, gathers: bool, n: int) -> tuple[list[tuple[torch.dtype, int]], list[tuple[str, list[int]]]]:
    """What a block sends in a step's forward and backward, and the sizes of all-reduces, moment by moment."""
    model = sharded(net(n, bias=False), replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=gathers))
    counted = Counted()
    model[0].set_custom_all_gather(counted)
    optimizer, moments = torch.optim.SGD(model.parameters(), lr=1e-3), []

    def during(name: str, run: Callable[[], Any]) -> Any:
        with counted_all_reduces() as calls:
            result = run()
        moments.append((name, [size for size, _ in calls]))
        return result

    for step in range(2):
        loss = during("forward", lambda step=step: model(batch(step, 0, rank())).square().sum())
        during("backward", loss.backward)
        during("step", optimizer.step)
        optimizer.zero_grad()
    return counted.sent, moments


@pytest.mark.parametrize("n", [64, 5])
@pytest.mark.parametrize(
    ("recipe", "gathers", "element", "row"),
    [
        ("tensorwise", True, 1, 0),
        ("delayed", True, 1, 0),
        ("rowwise", True, 1, 4),
        ("rowwise_with_gw_hp", True, 1, 4),
        ("tensorwise", False, 4, 0),
    ],
)
def test_an_element_is_one_byte_and_a_row_four_more(
    two: Ranks, recipe: str, gathers: bool, element: int, row: int, n: int
) -> None:
    """Scenario 45. The last case shows that the four bytes of a float32 weight would be seen; rows are padded."""
    dtype = torch.uint8 if gathers else torch.float32
    up, down = math.ceil(n / 2), math.ceil(K / 2)  # rows a rank
    expected = (up * K + down * n) * element + (up + down) * row
    for sent, _ in two(counts, recipe, gathers, n):
        assert sent == [(dtype, expected)] * 4, "each forward and each backward of two steps"


WEIGHTS, SCALES = 4, 12  # of the whole model; delayed scaling reduces three a layer, of which the weight's is unused
REDUCED = {
    "tensorwise": {"first": [WEIGHTS], "step": [WEIGHTS]},
    "delayed": {"first": [WEIGHTS], "step": [WEIGHTS, SCALES]},
    "rowwise": {"first": [], "step": []},
    "rowwise_with_gw_hp": {"first": [], "step": []},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_weights_amaxes_are_one_all_reduce_a_step(two: Ranks, recipe: str) -> None:
    """Right after the step: a forward has none, but for the first one; by rows there is none at all."""
    for _, moments in two(counts, recipe, True, N):
        first, step = REDUCED[recipe]["first"], REDUCED[recipe]["step"]
        assert [(name, sorted(sizes)) for name, sizes in moments] == [
            ("forward", first), ("backward", []), ("step", step), ("forward", []), ("backward", []), ("step", step),
        ]  # fmt: skip


# Mixed precision, powers of two, offloading


def power_of_two(recipe: str) -> f8.Recipe:
    """Every scale of it."""

    def rounded(gemm: f8.Gemm) -> f8.Gemm:
        return replace(gemm, left=replace(gemm.left, power_of_two=True), right=replace(gemm.right, power_of_two=True))

    plain = f8.Recipe.from_name(recipe)
    gemms = {name: rounded(getattr(plain, name)) for name in ("output", "grad_input", "grad_weight")}
    return replace(plain, **gemms, name="custom")


def mixed(recipe: f8.Recipe, options: dict[str, Any]) -> tuple[State, ...]:
    """The same batches on all ranks, against one process that computes in the same dtype with a float32 weight."""
    model = sharded(net(bias=False), replace(recipe, fsdp_float8_all_gather=True), **options)
    alone = f8.convert_to_float8_training(net(bias=False), config=recipe)
    dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    seen: tuple[State, State] = ({}, {})
    for step in range(STEPS):
        for run, optimizer, found in zip((model, alone), optimizers, seen, strict=True):
            y = run(batch(step, 0, 0).to(dtype))
            y.float().square().sum().backward()
            for parameter in alone.parameters() if run is alone else ():
                parameter.grad = parameter.grad.to(dtype).float()  # as a rank hands its own on
            found[f"{step}.y"] = y.detach()
            found.update({f"{step}.gradient.{name}": t for name, t in whole(run, gradients=True).items()})
            optimizer.step()
            optimizer.zero_grad()
            found.update({f"{step}.weight.{name}": t for name, t in whole(run).items()})
    return *seen, gathered(model), exact(model)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [(f8.Recipe.from_name(name), {"mp_policy": BF16}) for name in RECIPES]
    + [(power_of_two("tensorwise"), {}), (power_of_two("delayed"), {"mp_policy": BF16})]
    + [(f8.Recipe.from_name("tensorwise"), {"offload_policy": CPUOffloadPolicy(pin_memory=False)})]
    + [(f8.Recipe.from_name("rowwise"), {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": BF16})],
    ids=str,
)
def test_policies_and_powers_of_two_are_bitwise_as_in_one_process(
    two: Ranks, recipe: f8.Recipe, options: dict[str, Any]
) -> None:
    """A master weight in float32 is cast to float8 as it is, without bfloat16 in between."""
    answers = two(mixed, recipe, options)
    for ours, theirs, brought, expected in answers:
        assert_same_bits(ours, theirs)
        assert_same_bits(brought, expected)
        assert_same_bits(brought, answers[0][2])
        assert ours["0.y"].dtype == (torch.bfloat16 if "mp_policy" in options else torch.float32)
        if recipe.output.right.power_of_two:
            scales = torch.cat([t.flatten() for name, t in brought.items() if name.endswith(".scale")])
            assert torch.equal(scales.log2(), scales.log2().round())


# Weights that change otherwise


def another(recipe: str = "tensorwise", n: int = N) -> Any:
    """A sharded model with other weights, ten times as large."""
    model = sharded(net(n), recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-10)
    return model


def load(model: Any, **options: Any) -> None:
    model.load_state_dict(another(n=model[0][0].out_features).state_dict(), **options)
    gc.collect()  # the other model is gone, also where its tensors are this one's from here on


def load_whole(model: Any) -> None:
    """As torchtitan does from a checkpoint in one piece that one rank has read."""
    state = whole(another(n=model[0][0].out_features))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if rank() == 0 else {}, options=options)


def load_with_dcp(model: Any) -> None:
    """Into the local tensors, in place; and nowhere on a rank whose shard is empty."""
    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(another(n=model[0][0].out_features))}, checkpoint_id=folder[0])
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder[0])


@torch.no_grad()
def write(model: Any, local: bool) -> None:
    for parameter in model.parameters():
        tensor = parameter.to_local() if local else parameter
        tensor.copy_(tensor * -10)


@torch.no_grad()
def zero_one(model: Any) -> None:
    model[1][0].weight.zero_()


@torch.no_grad()
def widen(model: Any) -> None:
    """Only one element, of one rank, and only the amax."""
    if rank() == 0:
        model[0][0].weight.to_local()[0, 0] = 50.0
    else:
        model[0][0].weight.to_local()[:0] = 50.0  # a write of nothing: both ranks must know of it


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda model: load(model, assign=True),
    "set_model_state_dict": load_whole,
    "dcp.load": load_with_dcp,
    "copy_": lambda model: write(model, local=False),
    "copy_ into shards": lambda model: write(model, local=True),
    "zero_": zero_one,
    "one element": widen,
}


def after(change: str, recipe: str, n: int, used: bool) -> tuple[State, ...]:
    """Outputs, gradients and casts after a change, and those of a model in one process that has always been so."""
    model = sharded(net(n), recipe)
    if used:
        train(model, lambda step, microbatch: batch(step, microbatch, rank()), 1)
    CHANGES[change](model)
    x = batch(0, 0, 0)
    y = model(x)
    y.square().sum().backward()
    fresh = net(n)
    fresh.load_state_dict(whole(model))
    f8.convert_to_float8_training(fresh, config=recipe)
    expected = fresh(x)
    expected.square().sum().backward()
    return {"y": y.detach()}, {"y": expected.detach()}, gathered(model), exact(model)


@pytest.mark.parametrize(("n", "used"), [(N, True), (2, False)], ids=["trained", "new, with an empty shard"])
@pytest.mark.parametrize(
    ("change", "recipe"), [*((change, "tensorwise") for change in CHANGES), ("load_state_dict", "rowwise")]
)
def test_weights_that_changed_are_cast_with_their_own_scales(
    two: Ranks, three: Ranks, change: str, recipe: str, n: int, used: bool
) -> None:
    """Two rows on three ranks leave one of them none, which is told of no write."""
    for y, expected, brought, casts in (two if n == N else three)(after, change, recipe, n, used):
        assert_same_bits(y, expected)
        assert_same_bits(brought, casts)


def use_after_dropping(collects_on: int) -> State:
    """A model whose weights were never measured is dropped; on one rank its garbage is collected, on the other not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        dropped = another()
        assert dropped
        del dropped
        if rank() == collects_on:
            gc.collect()
        model = sharded(net(), "tensorwise")
        return {"y": model(batch(0, 0, 0)).detach()}
    finally:
        if collects:
            gc.enable()


def test_ranks_agree_whatever_their_garbage_collectors_did(two: Ranks) -> None:
    first, second = two(use_after_dropping, 1)
    assert_same_bits(first, second)


def on_meta(recipe: str, dtype: torch.dtype) -> tuple[State, ...]:
    """Built and sharded without memory, filled afterwards, as large models are."""
    model = sharded(net(device="meta"), recipe).to(dtype)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, net().to(dtype).state_dict(), options=options)
    alone = f8.convert_to_float8_training(net().to(dtype), config=recipe)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, alone)]
    seen: tuple[State, State] = ({}, {})
    for run, optimizer, found in zip((model, alone), optimizers, seen, strict=True):
        for step in range(2):
            found[f"{step}.loss"] = backward(run, batch(step, 0, 0).to(dtype))
            optimizer.step()
            optimizer.zero_grad()
        found.update(whole(run))
    return *seen, gathered(model), exact(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_from_the_meta_device_and_in_another_dtype(two: Ranks, recipe: str, dtype: torch.dtype) -> None:
    """Scenario 26: build, convert, shard, `.to(dtype)`, to_empty, fill, step."""
    for ours, theirs, brought, expected in two(on_meta, recipe, dtype):
        assert_same_bits(ours, theirs)
        assert_same_bits(brought, expected)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW(foreach=False)": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def with_optimizer(name: str) -> tuple[State, State, list[int]]:
    model = sharded(net(), "tensorwise")
    train(model, lambda step, microbatch: batch(step, microbatch, rank()), 1, OPTIMIZERS[name](model.parameters()))
    with counted_all_reduces() as calls:
        brought = gathered(model)
    return brought, exact(model), [size for size, _ in calls]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_step_is_followed_by_exact_scales(two: Ranks, name: str) -> None:
    """Also of fused ones, whose writes torch doesn't count; and then the next gather has nothing left to do."""
    for brought, expected, calls in two(with_optimizer, name):
        assert_same_bits(brought, expected)
        assert calls == []


@torch.no_grad()
def with_bad_number(bad: float, of_rank: int, by_step: bool) -> list[float]:
    """In one weight, of one rank's shard: put there, or by a step that a bad gradient has spoilt."""
    model = sharded(net(), "tensorwise")
    weight = model[0][2].weight
    numbers = weight.to_local().clone()
    if rank() == of_rank:
        numbers[-1, 3] = bad
    if by_step:
        weight.grad = torch.distributed.tensor.DTensor.from_local(numbers, weight.device_mesh, weight.placements)
        torch.optim.SGD([weight], lr=1.0).step()
    else:
        weight.to_local().copy_(numbers)
    return [model(batch(0, 0, rank())).square().sum().item() for _ in range(2)]


@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_nan_in_one_ranks_weight_reaches_the_loss_of_all(two: Ranks, of_rank: int, by_step: bool) -> None:
    """Scenario 14, and nobody hangs."""
    assert all(math.isnan(loss) for losses in two(with_bad_number, math.nan, of_rank, by_step) for loss in losses)
    assert all(math.isfinite(loss) for losses in two(with_bad_number, 0.5, of_rank, by_step) for loss in losses)


def by_hand() -> dict[str, Any]:
    """After writes that nobody counts; then again, and after a step."""
    model = sharded(net(), "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(batch(0, 0, rank()))
    for parameter in model.parameters():
        parameter.to_local().untyped_storage().copy_((parameter.detach().to_local() * 3).untyped_storage())
    stale, expected = gathered(model), exact(model)
    sizes = []
    for _ in range(2):
        with counted_all_reduces() as calls:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
        sizes.append([size for size, _ in calls])
    found = {"stale": stale, "fresh": gathered(model), "expected": expected, "sizes": sizes}
    backward(model, batch(1, 0, rank()))
    optimizer.step()
    before = gathered(model)
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    return {**found, "after": gathered(model), "before": before, "exact": exact(model)}


def test_scales_by_hand_after_a_write_that_nobody_counts(two: Ranks) -> None:
    for found in two(by_hand):
        assert not torch.equal(found["stale"]["0.0.scale"], found["expected"]["0.0.scale"]), "so there is a need of it"
        assert_same_bits(found["fresh"], found["expected"])
        assert found["sizes"] == [[WEIGHTS]] * 2
        assert_same_bits(found["before"], found["exact"])
        assert_same_bits(found["after"], found["exact"])


# Around the layers


def disabled(recipe: str) -> tuple[State, ...]:
    """In high precision; and one process with plain layers that hold the rounded weights."""
    model, plain = sharded(net(), recipe), net()
    with torch.no_grad():
        for fqn, layer in layers_of(model).items():
            cast = cast_with(plain.get_submodule(fqn).weight, layer.recipe.output.right, None)
            plain.get_submodule(fqn).weight.copy_(cast.payload.float() / cast.scale)
    seen: tuple[State, State] = ({}, {})
    with f8.float8_disabled(model):
        for run, found in zip((model, plain), seen, strict=True):
            found["loss"] = backward(run, batch(0, 0, 0))
            found.update({f"gradient.{name}": t for name, t in whole(run, gradients=True).items()})
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_disabled_layers_multiply_the_rounded_weight(two: Ranks, recipe: str) -> None:
    for ours, theirs in two(disabled, recipe):
        assert_same_bits(ours, theirs)


def evaluated(recipe: str, backend: str | None) -> tuple[State, ...]:
    model = sharded(net(blocks=1), recipe, backend)
    alone = f8.convert_to_float8_training(net(blocks=1), config=recipe)
    seen: tuple[State, State] = ({}, {})
    for run, found in zip((model, alone), seen, strict=True):
        with torch.no_grad():
            found["train, no_grad"] = run(batch(0, 0, 0))
            found["eval, no_grad"] = run.eval()(batch(0, 0, 0))
        found["eval"] = run(batch(0, 0, 0)).detach()
        found["loss"] = backward(run.train(), batch(0, 0, 0))
    return seen


@pytest.mark.parametrize(("recipe", "backend"), [*((r, None) for r in RECIPES), ("tensorwise", "aot_eager")])
def test_evaluation_is_bitwise_as_in_one_process(two: Ranks, recipe: str, backend: str | None) -> None:
    for ours, theirs in two(evaluated, recipe, backend):
        assert_same_bits(ours, theirs)


class Checkpointed(nn.Sequential):
    """Blocks whose forward runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def with_checkpoints(recipe: str, where: str, keep: bool) -> State:
    model = net()
    f8.convert_to_float8_training(model, config=gathering(recipe), recompute_weight_cast=not keep)
    if where == "inside":  # as torchtitan does it
        model = nn.Sequential(*map(checkpoint_wrapper, model))
    elif where == "around":
        model = Checkpointed(*model)
    for block in model:
        fully_shard(block)
    seen = train(fully_shard(model), lambda step, microbatch: batch(step, microbatch, rank()), 2)
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in seen.items()}


@pytest.mark.parametrize(("where", "keep"), [("inside", False), ("around", True)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(two: Ranks, recipe: str, where: str, keep: bool) -> None:
    for ours, theirs in zip(
        two(with_checkpoints, recipe, where, keep), two(with_checkpoints, recipe, "nowhere", False), strict=True
    ):
        assert_same_bits(ours, theirs)


# What others see of it


def outer() -> dict[str, Any]:
    model = sharded(net(), "tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, lambda step, microbatch: batch(step, microbatch, rank()), 1, optimizer)
    state, held = model.state_dict(), optimizer.state_dict()["state"]
    file = io.BytesIO()
    torch.save({name: t.to_local() for name, t in state.items()}, file)
    copied = io.BytesIO()
    torch.save({name: copy.deepcopy(t.to_local()) for name, t in state.items()}, copied)
    return {
        "files": [file.getvalue(), copied.getvalue()],
        "types": {type(t).__name__ for t in state.values()} | {type(p.data).__name__ for p in model.parameters()},
        "moments": {type(t.to_local()) for entry in held.values() for name, t in entry.items() if name != "step"},
        "whole": {type(t) for t in whole(model).values()},
        "sums": [t.to_local().double().sum().item() for t in state.values()],
    }


FRESH = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert "float8_compile" not in sys.modules
print(*({type(t).__name__ for t in state.values()}), *[t.double().sum().item() for t in state.values()])
"""


def test_optimizers_and_checkpoints_see_plain_dtensors(two: Ranks, tmp_path: Any) -> None:
    """Scenario 40: what a rank saves of its own loads where there is only torch."""
    for found in two(outer):
        assert found["types"] == {"DTensor"}
        assert found["moments"] == {Tensor}
        assert found["whole"] == {Tensor}
        for data in found["files"]:
            (tmp_path / "state").write_bytes(data)
            kind, *sums = run_python(FRESH, str(tmp_path / "state")).split()
            assert kind == "Tensor"
            assert [float(s) for s in sums] == found["sums"]


# Mistakes


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def asked(name: str, ask: Callable[[], Any]) -> None:
        try:
            ask()
            found[name] = "nothing raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    plain = net()
    for block in plain:
        fully_shard(block)
    before = {name: (type(m), id(p)) for name, m in plain.named_modules() for p in m.parameters(recurse=False)}
    asked("late", lambda: f8.convert_to_float8_training(plain, config=gathering("tensorwise")))
    after = {name: (type(m), id(p)) for name, m in plain.named_modules() for p in m.parameters(recurse=False)}
    found["unchanged"] = str(before == after and plain(batch(0, 0, 0)).isfinite().all().item())

    model = sharded(net(), "tensorwise")
    expected = model(batch(0, 0, 0)).detach()
    asked("back", lambda: f8.convert_from_float8_training(model))
    asked("cached", lambda: f8.cache_weight_casts(model))
    asked("off", lambda: setattr(model[0][0], "recipe", f8.Recipe.from_name("tensorwise")))
    asked("other cast", lambda: setattr(model[0][0], "recipe", gathering("rowwise")))
    other_gradient = replace(gathering("tensorwise"), grad_weight=f8.Recipe.from_name("rowwise_with_gw_hp").grad_weight)
    asked("same cast", lambda: setattr(model[0][0], "recipe", other_gradient))
    found["works"] = str(torch.equal(model(batch(0, 0, 0)), expected))

    ordinary = sharded(net(), f8.Recipe.from_name("tensorwise"))
    asked("on", lambda: setattr(ordinary[0][0], "recipe", gathering("tensorwise")))
    found["still works"] = str(torch.equal(ordinary(batch(0, 0, 0)), expected))

    switched = f8.convert_to_float8_training(net(), config="tensorwise")
    for layer in layers_of(switched).values():
        layer.recipe = gathering("rowwise")
        layer.recipe = f8.Recipe.from_name("tensorwise")
        layer.recipe = gathering("tensorwise")
    for block in switched:
        fully_shard(block)
    found["before"] = str(torch.equal(switched(batch(0, 0, 0)), expected))
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("late", r"ValueError: layer '0\.0' is sharded already.*before fully_shard.*fsdp_float8_all_gather=False"),
        ("unchanged", "True"),
        ("back", r"TypeError: layer '0\.0': .*convert back before fully_shard"),
        ("cached", r"TypeError: layer '0\.0': its weight is sharded .*leave out cache_weight_casts"),
        ("off", r"RuntimeError: layer '0\.0': its weight is sharded .*set fsdp_float8_all_gather before fully_shard"),
        ("other cast", r"RuntimeError: layer '0\.0': its weight is sharded .*before fully_shard"),
        ("same cast", "nothing raised"),
        ("works", "True"),
        ("on", r"(RuntimeError|ValueError|TypeError): layer '0\.0'.*before fully_shard"),
        ("still works", "True"),
        ("before", "True"),
    ],
)
def test_mistakes_name_the_layer_and_the_remedy(two: Ranks, name: str, expected: str) -> None:
    for found in two(refusals):
        assert re.fullmatch(f"{expected}.*", found[name], re.DOTALL), found[name]


# Weights that are shared


class Tied(nn.Module):
    """An embedding whose weight is the head's; two layers that share one; all float8 layers but the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, K)
        self.first, self.second, self.head = nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, 32, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(x))))


def tied(recipe: str) -> dict[str, Any]:
    model, alone = Tied(), f8.convert_to_float8_training(Tied(), config=recipe)
    f8.convert_to_float8_training(model, config=gathering(recipe))
    recipes = {row.fqn: row.recipe.fsdp_float8_all_gather for row in f8.conversion_report(model)}
    fully_shard(model)
    counted = Counted()
    model.set_custom_all_gather(counted)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, alone)]
    seen: tuple[State, State] = ({}, {})
    for run, optimizer, found in zip((model, alone), optimizers, seen, strict=True):
        for step in range(2):
            tokens = torch.arange(16) * (step + 1) % 32
            found[f"{step}.loss"] = backward(run, tokens)
            found.update({f"{step}.gradient.{name}": t for name, t in whole(run, gradients=True).items()})
            optimizer.step()
            optimizer.zero_grad()
        found.update(whole(run))
    shared = model.first.weight is model.second.weight and model.first.gather is model.second.gather
    return {"seen": seen, "recipes": recipes, "sent": counted.sent[0], "shared": shared}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_shared_weights_are_gathered_as_all_who_hold_them_want(two: Ranks, recipe: str) -> None:
    """Scenario 23. A lookup wants high precision; two layers with one cast share one gather."""
    for found in two(tied, recipe):
        assert found["recipes"] == {"first": True, "second": True, "head": False}
        assert found["shared"]
        embedding, weight, biases = 4 * 32 * K // 2, K * K // 2, 4 * 2 * K // 2
        assert found["sent"] == (torch.uint8, embedding + weight + biases + (4 * K // 2 if recipe == "rowwise" else 0))
        assert_same_bits(*found["seen"])


# Replicas of shards (HSDP)


def on_a_mesh_of_replicas(recipe: str) -> tuple[State, State, list[list[int]]]:
    """Two replicas of two shards, against one process; and the ranks of each amax all-reduce of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, alone = sharded(net(), recipe, mesh=mesh), f8.convert_to_float8_training(net(), config=recipe)
    with counted_all_reduces() as calls:
        for module in (model, alone):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
            for step in range(STEPS):
                module(batch(step, 0, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    groups = [torch.distributed.get_process_group_ranks(group) for size, group in calls if group and size == WEIGHTS]
    return whole(model), whole(alone), groups


@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_of_shards_are_bitwise_as_in_one_process(four: Ranks, recipe: str) -> None:
    """Amaxes are reduced over the shards of one replica, which have the whole weight together."""
    for number, (ours, theirs, groups) in enumerate(four(on_a_mesh_of_replicas, recipe)):
        assert_same_bits(ours, theirs)
        assert all(group == [number // 2 * 2, number // 2 * 2 + 1] for group in groups)
        assert bool(groups) == (recipe in ("tensorwise", "delayed"))
