"""Tensor and sequence parallel linears, on two ranks, with FSDP2 on four: what one process computes, sent in float8.

What no rank sums over is bitwise what one process computes: every cast and every scale that a GEMM reads, the weights'
gradients, and the weights after steps of AdamW. Where the ranks' parts are summed (a rowwise layer's output, a colwise
one's input gradient, the gradient of a bias whose tokens are split) the order of a sum is another one: within 1e-6 of
the largest in float32, and within a rounding of each part in bfloat16.

A sum's last bit can decide how the next layer rounds to float8, which is why the model here has one rowwise layer, the
last one, and its output's gradient is given.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
from compile_checks import graphs_of
from delayed_checks import State, assert_same_bits, settled_state_of, state_of
from ranks import Ranks, rank
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import float8_compile as f8
from float8_compile import gemm
from float8_compile.cast import cast_operand
from float8_compile.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

K, N, BATCH, SEQUENCE, STEPS = 48, 64, 2, 8, 3
TOKENS = BATCH * SEQUENCE
RANKS = 2
RECIPES = f8.Recipe.names()
STYLES = Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
TORCHS_STYLES = ColwiseParallel, RowwiseParallel, PrepareModuleInput


@functools.cache
def line() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


# The model, and how it is split


class MLP(nn.Module):
    """Llama's: two layers that read one input, and one that reads what they make of it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N, bias), nn.Linear(K, N, bias), nn.Linear(N, K, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def mlp(recipe: Any, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """The same each time."""
    torch.manual_seed(0)
    return f8.convert_to_float8_training(MLP(bias).to(dtype), config=recipe)


@dataclass(frozen=True)
class Layout:
    """tokens: the axis along which inputs and outputs are split. prepared: whether `PrepareFloat8ModuleInput` gathers
    the input, for both layers that read it, and with which `use_local_output`. None: each layer gathers it itself.
    """

    shape: tuple[int, ...]
    tokens: int | None = None
    prepared: bool | None = None

    def part(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """What this rank has of an input or an output."""
        return whole if self.tokens is None else whole.chunk(mesh.size(), self.tokens)[mesh.get_local_rank()]

    def split(self, block: Any, mesh: DeviceMesh, torchs: bool = False) -> Any:
        """The block, split over the ranks, by our styles or by torch's, which take the same arguments."""
        colwise, rowwise, prepared = TORCHS_STYLES if torchs else STYLES
        given = Replicate() if self.tokens is None else Shard(self.tokens)
        read = given if self.prepared is None else Replicate()
        if self.prepared is not None:
            prepare = prepared(input_layouts=given, desired_input_layouts=Replicate(), use_local_output=self.prepared)
            parallelize_module(block, mesh, prepare)
            if not torchs:
                block.up.input_scale = block.gate.input_scale  # cast once, so one scale, where it is delayed
        styles = {
            "gate": colwise(input_layouts=read),
            "up": colwise(input_layouts=read),
            "down": rowwise(output_layouts=given),
        }
        return parallelize_module(block, mesh, styles)


LAYOUTS = {
    "whole tokens": Layout((BATCH, SEQUENCE)),
    "Shard(1)": Layout((BATCH, SEQUENCE), tokens=1),
    "Shard(0)": Layout((TOKENS,), tokens=0),
    "prepared": Layout((BATCH, SEQUENCE), tokens=1, prepared=False),
    "prepared, local": Layout((BATCH, SEQUENCE), tokens=1, prepared=True),
}


def numbers(*shape: int, seed: int) -> Tensor:
    """Of magnitudes from 1/2 to 2, so that no cast under a scale per row is subnormal: what is gathered by rows and
    cast again by columns is rounded once."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 1.5 + 0.5) * (torch.randint(2, shape, generator=generator) * 2 - 1)


def batch(layout: Layout, step: int, louder: float = 100) -> tuple[Tensor, Tensor]:
    """All ranks' inputs and their outputs' gradients: of another magnitude each step, and louder in the last tokens."""
    size = torch.ones(*layout.shape, 1)
    size[..., layout.shape[-1] // 2 :, :] = louder
    x, g = (numbers(*layout.shape, K, seed=seed) * size * (1 + step) for seed in (2 * step, 2 * step + 1))
    return x, g


def whole(model: nn.Module, gradients: bool = False) -> State:
    """Every parameter, or its gradient, put together from all ranks. Collective."""
    tensors = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    # A copy: of what each rank has whole, full_tensor is the very tensor.
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


# What a step computes, on a rank and in one process


@dataclass
class Read:
    """What a GEMM read: payload and 1 / scale of each operand, or high precision and None."""

    gemm: str
    left: tuple[Tensor, Tensor | None]
    right: tuple[Tensor, Tensor | None]


@contextlib.contextmanager
def recorded_gemms() -> Iterator[list[Read]]:
    """What each GEMM inside reads, in order."""
    reads: list[Read] = []
    before = {name: getattr(gemm, name) for name in ("output", "grad_input", "grad_weight")}

    def noted(operand: Any) -> tuple[Tensor, Tensor | None]:
        payload, unscale = gemm._parts(operand)
        return payload.contiguous().clone(), None if unscale is None else unscale.clone()

    def recording(name: str, left: Any, right: Any, *args: Any, **kwargs: Any) -> Tensor:
        reads.append(Read(name, noted(left), noted(right)))
        return before[name](left, right, *args, **kwargs)

    for name in before:
        setattr(gemm, name, functools.partial(recording, name))
    try:
        yield reads
    finally:
        for name, function in before.items():
            setattr(gemm, name, function)


def settled(model: Any) -> State:
    """The scales, but for those of an input that was cast once for two layers, which have one."""
    return {name: t for name, t in settled_state_of(model).items() if not name.startswith("up.input")}


def train(model: Any, data: list[tuple[Tensor, ...]]) -> dict[str, State]:
    """Steps of AdamW: outputs and inputs' gradients of this rank; of all, gradients, weights, scales."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own: State = {}
    parameters: State = {}
    for step, (x, g) in enumerate(data):
        x = x.clone().requires_grad_()
        y = model(x)
        y.backward(g)
        # A copy, since torch's styles hand on what has not arrived yet.
        own.update({f"{step}.y": y.detach().clone(), f"{step}.x gradient": x.grad.clone()})
        parameters.update({f"{step}.gradient.{name}": t for name, t in whole(model, gradients=True).items()})
        optimizer.step()
        optimizer.zero_grad()
        parameters.update({f"{step}.weight.{name}": t for name, t in whole(model).items()})
    return {"own": own, "parameters": parameters, "scales": settled(model)}


def both(recipe: Any, layout: Layout, backend: str | None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same steps on the ranks and, on each of them, as one process."""
    model, alone, mesh = mlp(recipe, dtype=dtype), mlp(recipe, dtype=dtype), line()
    layout.split(model, mesh)
    if backend:
        torch._dynamo.reset()
        model.compile(backend=backend, fullgraph=True)
    data = [tuple(t.to(dtype) for t in batch(layout, step)) for step in range(STEPS)]
    with contextlib.nullcontext([]) if backend else recorded_gemms() as ours:
        found = train(model, [tuple(layout.part(t, mesh) for t in pair) for pair in data])
    with recorded_gemms() as theirs:
        expected = train(alone, data)
    expected["own"] = {name: layout.part(t, mesh) for name, t in expected["own"].items()}
    return {"found": found, "expected": expected, "ours": ours, "theirs": theirs}


def assert_close(actual: State, expected: State, bound: float) -> None:
    """Within a bound, relative to each tensor's largest."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        largest = expected[name].abs().max().item()
        assert largest > 0, f"{name} is 0 throughout: nothing is compared"
        difference = (tensor.float() - expected[name].float()).abs().max().item()
        assert difference <= bound * largest, f"{name}: {difference / largest:.2g} of the largest"


def summed(layout: Layout) -> tuple[str, ...]:
    """Parameters whose gradient is a sum over ranks."""
    return () if layout.tokens is None else ("down.bias",)


def assert_as_in_one_process(answers: list[dict[str, Any]], layout: Layout, bound: float = 1e-6) -> None:
    for answer in answers:
        found, expected = answer["found"], answer["expected"]
        assert_close(found["own"], expected["own"], bound)
        names = [name for name in found["parameters"] if name.endswith(summed(layout) or "nothing")]
        assert_close(*({name: each["parameters"].pop(name) for name in names} for each in (found, expected)), bound)
        assert_same_bits(found["parameters"], expected["parameters"])
        assert_same_bits(found["scales"], expected["scales"])


COLWISE = {"output": (None, 0), "grad_input": (1, 0), "grad_weight": (1, None)}
ROWWISE = {"output": (1, 1), "grad_input": (None, 1), "grad_weight": (None, 1)}
A_STEP = [  # the GEMMs of a step in order, and along which axis each one's operands are split
    ("output", COLWISE), ("output", COLWISE), ("output", ROWWISE),
    ("grad_input", ROWWISE), ("grad_weight", ROWWISE),
    ("grad_input", COLWISE), ("grad_weight", COLWISE), ("grad_input", COLWISE), ("grad_weight", COLWISE),
]  # fmt: skip


def assert_parts_of_one_process(answers: list[dict[str, Any]], layout: Layout) -> None:
    """What each GEMM reads on a rank is bitwise its part of what one process reads, and so are the scales.

    What was gathered by rows and is cast again by columns has, where a column's amax was rounded over a power of two,
    a scale of twice or half the size, and the same numbers.
    """
    for number, answer in enumerate(answers):
        assert len(answer["ours"]) == len(answer["theirs"]) == STEPS * len(A_STEP)
        for (name, axes), ours, theirs in zip(A_STEP * STEPS, answer["ours"], answer["theirs"], strict=True):
            assert ours.gemm == theirs.gemm == name
            pairs = (ours.left, theirs.left), (ours.right, theirs.right)
            for axis, (found, expected) in zip(axes[name], pairs, strict=True):
                payload, unscale = (part_along(t, axis, number) for t in expected)
                assert found[0].dtype is payload.dtype
                if unscale is None:
                    assert torch.equal(found[0], payload), name
                    assert found[1] is None
                elif layout.tokens is not None and name == "grad_weight" and unscale.dim() > 0:
                    assert torch.equal(found[0].float() * found[1], payload.float() * unscale), name
                else:
                    assert torch.equal(found[0].view(torch.uint8), payload.view(torch.uint8)), f"{name}: other bytes"
                    assert torch.equal(found[1], unscale), f"{name}: another scale"


def part_along(tensor: Tensor | None, axis: int | None, number: int) -> Tensor | None:
    """A rank's part; all of what is one scale, along this axis or altogether."""
    if tensor is None or axis is None or tensor.dim() == 0 or tensor.shape[axis] == 1:
        return tensor
    return tensor.chunk(RANKS, axis)[number]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_eagerly_as_in_one_process(two: Ranks, recipe: str, layout: str) -> None:
    """Three steps of AdamW. One rank's tokens are 100 times louder: a scale of its own would be another one."""
    answers = two(both, recipe, LAYOUTS[layout], None)
    assert_as_in_one_process(answers, LAYOUTS[layout])
    assert_parts_of_one_process(answers, LAYOUTS[layout])


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", "Shard(1)"),
        ("delayed", "prepared"),
        ("rowwise", "Shard(0)"),
        ("rowwise", "prepared, local"),
        ("rowwise_with_gw_hp", "whole tokens"),
    ],
)
def test_compiled_as_in_one_process(two: Ranks, recipe: str, layout: str) -> None:
    """In one graph, with the bits of eager mode. A compiled module's own input is prepared before it."""
    assert_as_in_one_process(two(both, recipe, LAYOUTS[layout], "aot_eager"), LAYOUTS[layout])


# One scale on all ranks


def scales_of_a_step(recipe: str, layout: Layout, step: int) -> list[tuple[str, Tensor, Tensor]]:
    """Of each GEMM, 1 / scale of what it reads; every rank's rows, columns and tokens have other magnitudes."""
    model, mesh = mlp(recipe), line()
    layout.split(model, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1 + 9 * rank())
    for number in range(step + 1):
        with recorded_gemms() as reads:
            x, g = (layout.part(t, mesh) for t in batch(layout, number))
            model(x.clone().requires_grad_()).backward(g)
        if number < step:
            f8.update_delayed_scaling(model)
    return [(read.gemm, read.left[1], read.right[1]) for read in reads]


@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize(("recipe", "step"), [("tensorwise", 0), ("delayed", 0), ("delayed", 1)])
def test_a_tensor_has_one_scale_on_all_ranks(two: Ranks, recipe: str, step: int, layout: str) -> None:
    """Dynamic, delayed before there is evidence, and with it."""
    first, second = two(scales_of_a_step, recipe, LAYOUTS[layout], step)
    assert len(first) == len(A_STEP)
    for (name, *ours), (_, *theirs) in zip(first, second, strict=True):
        assert all(scale.dim() == 0 for scale in ours)
        assert ours == theirs, name


# What goes over the wire


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """The collectives inside, in order: name, and dtype and numel of what this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace in ("_c10d_functional", "c10d") and name != "wait_tensor":
            tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            self.calls.append((name, tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[torch.dtype, int]]:
        return [(dtype, numel) for call, dtype, numel in self.calls if call == name]


GATHER, SCATTER, SUM, AMAX = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "allreduce_"


def sent(recipe: str, layout: Layout, step: int) -> dict[str, dict[str, list[tuple[torch.dtype, int]]]]:
    """What a rank sends in the forward, the backward and the optimizer's part of that step."""
    model, mesh = mlp(recipe, bias=False), line()
    layout.split(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    moments: dict[str, Sent] = {}
    for number in range(step + 1):
        moments = {name: Sent() for name in ("forward", "backward", "step")}
        x, g = (layout.part(t, mesh) for t in batch(layout, number))
        with moments["forward"]:
            y = model(x.clone().requires_grad_())
        with moments["backward"]:
            y.backward(g)
        with moments["step"]:
            optimizer.step()
        optimizer.zero_grad()
    return {name: {kind: s.of(kind) for kind in (GATHER, SCATTER, SUM, AMAX)} for name, s in moments.items()}


HALF = TOKENS // RANKS
BYTES, SCALES, FLOATS = (torch.uint8, HALF * K), (torch.float32, HALF), (torch.float32, HALF * K)
GATHERED = {  # of an input, and of an output's gradient
    "tensorwise": [BYTES],
    "delayed": [BYTES],
    "rowwise": [BYTES, SCALES],
    "rowwise_with_gw_hp": [FLOATS],  # of both, a high-precision GEMM reads them
}


@pytest.mark.parametrize(
    ("layout", "times"), [("Shard(1)", 2), ("Shard(0)", 2), ("prepared", 1), ("prepared, local", 1)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_element_is_gathered_as_one_byte(two: Ranks, recipe: str, layout: str, times: int) -> None:
    """And a row's scale as four more. What is prepared is gathered once for both layers that read it, and its gradient
    is summed once; in eager mode, where a graph would see that two all-gathers are the same."""
    whole_sum = (torch.float32, TOKENS * K)
    for moments in two(sent, recipe, LAYOUTS[layout], 1):
        assert moments["forward"][GATHER] == GATHERED[recipe] * times
        assert moments["backward"][GATHER] == GATHERED[recipe]
        assert moments["forward"][SCATTER] == [whole_sum]
        # What torch's own style has prepared, in high precision, each layer sums for itself.
        summed_here = recipe == "rowwise_with_gw_hp" and "prepared" in layout
        assert moments["backward"][SCATTER] == ([] if summed_here else [whole_sum] * times)
        assert moments["backward"][SUM] == ([whole_sum] * 2 if summed_here else [])
        assert not moments["forward"][SUM]


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_tokens_are_gathered_by_no_one(two: Ranks, recipe: str) -> None:
    """An all-reduce of the output, and one of each gradient of the input."""
    whole_sum = (torch.float32, TOKENS * K)
    for moments in two(sent, recipe, LAYOUTS["whole tokens"], 1):
        assert not any(moments[moment][kind] for moment in moments for kind in (GATHER, SCATTER))
        assert moments["forward"][SUM] == [whole_sum]
        assert moments["backward"][SUM] == [whole_sum] * 2


AMAXES = {  # all-reduces of amaxes, by what forward and backward need; weights are cast again in backward
    ("tensorwise", "whole tokens"): (2 + 2, 2),  # of w twice, of w and x of `down`; of g of `gate` and `up`
    ("tensorwise", "Shard(1)"): (4 + 2, 1 + 2),
    ("tensorwise", "prepared"): (1 + 2 + 2, 1 + 2),
    ("delayed", "Shard(1)"): (0, 0),
    ("delayed", "whole tokens"): (0, 0),
}


@pytest.mark.parametrize(("recipe", "layout"), AMAXES)
def test_a_scale_costs_an_all_reduce_of_one_number(two: Ranks, recipe: str, layout: str) -> None:
    """A delayed one none: all of the model's are one all-reduce after the step."""
    forward, backward = AMAXES[recipe, layout]
    for moments in two(sent, recipe, LAYOUTS[layout], 1):
        one = (torch.float32, 1)
        assert moments["forward"][AMAX] == [one] * forward
        assert moments["backward"][AMAX] == [one] * backward
        assert moments["step"][AMAX] == ([(torch.float32, 9)] if recipe == "delayed" else [])  # 3 layers, 3 roles


def with_warnings_as_errors(layout: Layout) -> None:
    """A step, forward and backward."""
    model, mesh = mlp("tensorwise"), line()
    layout.split(model, mesh)
    x, g = (layout.part(t, mesh) for t in batch(layout, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x.clone().requires_grad_()).backward(g)


@pytest.mark.parametrize("layout", ["Shard(1)", "Shard(0)"])
def test_torch_warns_of_nothing(two: Ranks, layout: str) -> None:
    """As it does of collectives that it has renamed."""
    two(with_warnings_as_errors, LAYOUTS[layout])


# Other dtypes and modes


@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_as_in_one_process(two: Ranks, recipe: str, layout: str) -> None:
    """Of an input's gradient four parts are rounded to 8 bits, two layers' on two ranks, and their sums."""
    answers = two(both, recipe, LAYOUTS[layout], None, torch.bfloat16)
    assert_as_in_one_process(answers, LAYOUTS[layout], bound=2**-6)
    assert_parts_of_one_process(answers, LAYOUTS[layout])


def with_autocast(recipe: str, layout: Layout) -> tuple[dict[str, Any], dict[str, Any], torch.dtype]:
    """float32 weights and inputs under bfloat16 autocast."""
    model, alone, mesh = mlp(recipe), mlp(recipe), line()
    layout.split(model, mesh)
    pairs = [batch(layout, step) for step in range(STEPS)]
    data = [(x, g.bfloat16()) for x, g in pairs]
    with torch.autocast("cpu", torch.bfloat16):
        found = train(model, [tuple(layout.part(t, mesh) for t in pair) for pair in data])
        expected = train(alone, data)
    expected["own"] = {name: layout.part(t, mesh) for name, t in expected["own"].items()}
    return {"found": found, "expected": expected}


@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_as_in_one_process(two: Ranks, recipe: str, layout: str) -> None:
    answers = two(with_autocast, recipe, LAYOUTS[layout])
    assert answers[0]["found"]["own"]["0.y"].dtype is torch.bfloat16
    assert answers[0]["found"]["own"]["0.x gradient"].dtype is torch.float32
    assert_as_in_one_process(answers, LAYOUTS[layout], bound=2**-6)


def without_gradients(recipe: str, layout: Layout, mode: str) -> dict[str, Any]:
    """A step, then outputs under no_grad and in eval, for which no scale moves."""
    model, alone, mesh = mlp(recipe), mlp(recipe), line()
    layout.split(model, mesh)
    x, g = batch(layout, 0)
    found, expected = train(model, [(layout.part(x, mesh), layout.part(g, mesh))]), train(alone, [(x, g)])
    for run in (model, alone):
        run.train(mode != "eval")
    before = state_of(model)
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        found["own"] = {"y": model(layout.part(3 * x, mesh)).detach()}
        expected["own"] = {"y": layout.part(alone(3 * x), mesh).detach()}
    assert_same_bits(state_of(model), before)
    return {"found": found, "expected": expected}


@pytest.mark.parametrize("mode", ["no_grad", "eval"])
@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_without_gradients_as_in_one_process(two: Ranks, recipe: str, layout: str, mode: str) -> None:
    assert_as_in_one_process(two(without_gradients, recipe, LAYOUTS[layout], mode), LAYOUTS[layout])


def checkpointed(recipe: str, layout: Layout) -> tuple[dict[str, State], dict[str, State]]:
    """The same steps with the block's activations kept, and with all of them computed again in backward."""
    mesh, results = line(), []
    data = [tuple(layout.part(t, mesh) for t in batch(layout, step)) for step in range(STEPS)]
    for wrap in (lambda block: block, checkpoint_wrapper):  # its use_reentrant is False
        model = mlp(recipe)
        layout.split(model, mesh)
        result = train(wrap(model), data)
        results.append({**result, "scales": settled(model)})
    kept, again = results
    again["parameters"] = {
        name.replace("_checkpoint_wrapped_module.", ""): t for name, t in again["parameters"].items()
    }
    return kept, again


@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_a_block_changes_no_bit(two: Ranks, recipe: str, layout: str) -> None:
    """Collectives run again, on all ranks alike."""
    for kept, computed_again in two(checkpointed, recipe, LAYOUTS[layout]):
        for part, state in kept.items():
            assert_same_bits(computed_again[part], state)


def disabled(layout: Layout) -> tuple[State, State]:
    """A step in high precision, and the same model with torch's linears and torch's styles."""
    mesh = line()
    model, plain = mlp("delayed"), mlp("delayed")
    f8.convert_from_float8_training(plain)
    layout.split(model, mesh)
    layout.split(plain, mesh, torchs=True)
    x, g = (layout.part(t, mesh) for t in batch(layout, 0))
    with f8.float8_disabled(model):
        found = train(model, [(x, g)])
    expected = train(plain, [(x, g)])
    # Not the weights: a step of Adam makes of a gradient its sign, of a rounding as of any other.
    for each in (found, expected):
        each["own"].update({name: t for name, t in each["parameters"].items() if "gradient" in name})
    return found["own"], expected["own"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_disabled_it_is_torchs_tensor_parallelism(two: Ranks, layout: str) -> None:
    """To the order of sums in float32."""
    for found, expected in two(disabled, LAYOUTS[layout]):
        assert_close(found, expected, 1e-5)


# With FSDP2: two ranks hold a batch's parts, and two of the model


@functools.cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def train_alone(model: Any, layout: Layout, mine: int) -> dict[str, State]:
    """Steps on the average of both batches' gradients, in one process; outputs and inputs' gradients of one of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own: State = {}
    parameters: State = {}
    for step in range(STEPS):
        sums = []
        for number in range(2):
            x, g = batch_of(layout, step, number)
            x.requires_grad_()
            y = model(x)
            y.backward(g)
            if number == mine:
                own.update({f"{step}.y": y.detach(), f"{step}.x gradient": x.grad})
            sums.append(whole(model, gradients=True))
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = sum(each[name] for each in sums) / 2
        parameters.update({f"{step}.gradient.{name}": t for name, t in whole(model, gradients=True).items()})
        optimizer.step()
        optimizer.zero_grad()
        parameters.update({f"{step}.weight.{name}": t for name, t in whole(model).items()})
    return {"own": own, "parameters": parameters, "scales": settled(model)}


def batch_of(layout: Layout, step: int, number: int) -> tuple[Tensor, ...]:
    """The batch of a data parallel rank: the second one's is ten times as large."""
    return tuple(t * (1 + 9 * number) for t in batch(layout, step, louder=10 + number))


def both_with_fsdp(recipe: str, gathers: bool, layout: Layout) -> dict[str, Any]:
    """The same steps on four ranks and, on each of them, as one process."""
    config = replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=gathers)
    model, alone, dp, tp = mlp(config), mlp(recipe), square()["dp"], square()["tp"]
    layout.split(model, tp)
    fully_shard(model, mesh=dp)
    mine = dp.get_local_rank()
    data = [tuple(layout.part(t, tp) for t in batch_of(layout, step, mine)) for step in range(STEPS)]
    found, expected = train(model, data), train_alone(alone, layout, mine)
    expected["own"] = {name: layout.part(t, tp) for name, t in expected["own"].items()}
    if gathers:  # a weight's scale is FSDP2's, not the layer's
        expected["scales"] = {name: t for name, t in expected["scales"].items() if ".weight." not in name}
        for fqn, layer in model.named_children():
            if not layer.gather.by_row:
                exact = cast_operand(alone.get_submodule(fqn).weight.detach(), layer.gather.cast)
                found["scales"][f"{fqn}.weight"], expected["scales"][f"{fqn}.weight"] = layer.gather.scale, exact.scale
    return {"found": found, "expected": expected}


@pytest.mark.parametrize("layout", ["whole tokens", "Shard(1)", "prepared"])
@pytest.mark.parametrize("gathers", [False, True], ids=["", "float8 all-gather"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_with_fsdp_as_in_one_process(four: Ranks, recipe: str, gathers: bool, layout: str) -> None:
    """Three steps of AdamW on both batches' average; of `down`, both split the rows of its weight."""
    answers = four(both_with_fsdp, recipe, gathers, LAYOUTS[layout])
    assert_as_in_one_process(answers, LAYOUTS[layout])
    for answer in answers[1:]:
        assert_same_bits(answer["found"]["scales"], answers[0]["found"]["scales"])


def measured_while_gathered(layout: Layout) -> tuple[State, State]:
    """The scales that weights written to behind torch's back have, and should have."""
    config = replace(f8.Recipe.from_name("tensorwise"), fsdp_float8_all_gather=True)
    model, alone, tp = mlp(config), mlp("tensorwise"), square()["tp"]
    layout.split(model, tp)
    fully_shard(model, mesh=square()["dp"], reshard_after_forward=False)
    x = layout.part(batch(layout, 0)[0], tp)
    for number in range(2):
        with torch.no_grad():
            model(x)  # leaves the weights gathered, which are DTensors on the model's ranks
        if number == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
    found = {fqn: layer.gather.scale.clone() for fqn, layer in model.named_children()}
    layers = alone.named_children()
    return found, {fqn: cast_operand(layer.weight.detach(), config.output.right).scale for fqn, layer in layers}


def test_scales_are_the_shards_also_while_weights_are_gathered(four: Ranks) -> None:
    """Passes with tp_4_gathered_weight_2d.patch."""
    for found, expected in four(measured_while_gathered, LAYOUTS["Shard(1)"]):
        assert_same_bits(found, expected)


# A number that is none


def with_nan(recipe: str, layout: Layout, where: int | None) -> dict[str, Any]:
    """Three steps, of which the second has a NaN among one rank's tokens and is skipped."""
    model, mesh = mlp(recipe), line()
    layout.split(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if step == 1 and where is None:
            continue
        x = layout.part(batch(layout, step)[0], mesh).clone()
        if step == 1 and rank() == where:
            x[..., 0, 0] = math.nan
        loss = model(x).square().mean()
        loss.backward()
        whole_loss = loss.detach().clone()
        torch.distributed.all_reduce(whole_loss)
        losses.append(whole_loss.item())
        finite = all(p.grad.to_local().isfinite().all() for p in model.parameters())
        assert finite == (step != 1), "each rank sees it in its part of the gradients"
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": whole(model), "scales": settled(model)}


@pytest.mark.parametrize("layout", ["Shard(1)", "prepared"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("where", range(RANKS))
def test_a_nan_on_one_rank_is_one_on_all(two: Ranks, where: int, recipe: str, layout: str) -> None:
    """In the whole loss, and in each rank's gradients; the step is skipped, and one later nothing is left of it."""
    clean = two(with_nan, recipe, LAYOUTS[layout], None)
    for answer, other in zip(two(with_nan, recipe, LAYOUTS[layout], where), clean, strict=True):
        first, bad, last = answer["losses"]
        assert math.isnan(bad)
        assert [first, last] == other["losses"]
        assert_same_bits(answer["weights"], other["weights"])
        assert_same_bits(answer["scales"], other["scales"])


# Mistakes


def message_of(mistake: str) -> str:
    """The error of a mistake, as it is raised."""
    mesh, colwise, rowwise = line(), Float8ColwiseParallel, Float8RowwiseParallel
    prepare = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())

    def two_recipes(linear: nn.Module, fqn: str) -> str:
        return "rowwise" if fqn == "up" else "tensorwise"

    def split(model: nn.Module, **styles: Any) -> nn.Module:
        return parallelize_module(model, mesh, styles)

    mistakes = {
        "a plain linear": lambda: split(MLP(), up=colwise()),
        "a plain linear, rowwise": lambda: split(MLP(), down=rowwise()),
        "an embedding": lambda: parallelize_module(nn.Embedding(4, 4), mesh, colwise()),
        "nothing to prepare for": lambda: parallelize_module(MLP(), mesh, prepare),
        "two ways to cast": lambda: parallelize_module(mlp(two_recipes), mesh, prepare),
        "counted from the back": lambda: split(mlp("rowwise"), up=colwise(input_layouts=Shard(-2))),
        "counted from the back, rowwise": lambda: split(mlp("rowwise"), down=rowwise(output_layouts=Shard(-2))),
        "converted back": lambda: f8.convert_from_float8_training(split(mlp("rowwise"), up=colwise())),
        "float8_dtype": lambda: PrepareFloat8ModuleInput(float8_dtype=torch.float8_e5m2),
        "torch's style": lambda: split(mlp("delayed"), up=ColwiseParallel())(torch.ones(2, K)),
    }
    try:
        mistakes[mistake]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("a plain linear", "TypeError: Float8ColwiseParallel .* is a Linear: call convert_to_float8_training first"),
        ("a plain linear, rowwise", "TypeError: Float8RowwiseParallel .* call convert_to_float8_training first"),
        ("an embedding", "TypeError: .* this is a Embedding: .* use torch's style without Float8 in its name"),
        ("nothing to prepare for", "ValueError: PrepareFloat8ModuleInput of a MLP .* no Float8Linear: convert first"),
        ("two ways to cast", "ValueError: .*gate: tensorwise, up: rowwise, .* or name a layer by fwd_config"),
        ("counted from the back", r"ValueError: input_layouts=S.*\(.*-2\): count .* from the front"),
        ("counted from the back, rowwise", r"ValueError: output_layouts=S.*\(.*-2\): count .* from the front"),
        ("converted back", "TypeError: layer 'up' is split over ranks"),
        ("float8_dtype", "NotImplementedError: float8_dtype=torch.float8_e5m2: inputs are cast to torch.float8_e4m3fn"),
        ("torch's style", "TypeError: Float8Linear 'up': .* use .*Float8ColwiseParallel or Float8RowwiseParallel"),
    ],
)
def test_a_mistake_says_what_to_do(two: Ranks, mistake: str, message: str) -> None:
    for answer in two(message_of, mistake):
        assert re.match(message, answer), answer


# Async tensor parallelism: Inductor looks for a GEMM that reads what an all-gather brings, and pipelines the two


def fusible(recipe: str, layout: Layout) -> dict[str, list[list[str]]]:
    """Of each all-gather in the graphs, the GEMMs that read it as it is, as Inductor's pass finds them; and of each
    reduce-scatter the one whose result it sends."""
    from torch._inductor.fx_passes import micro_pipeline_tp as inductors

    model, mesh = mlp(recipe, bias=False, dtype=torch.bfloat16), line()
    layout.split(model, mesh)
    x, g = (layout.part(t.bfloat16(), mesh) for t in batch(layout, 0))

    def step(run: Any) -> None:
        run(x.clone().requires_grad_()).backward(g)

    if recipe == "delayed":
        model.up.input_scale = model.gate.input_scale  # of two scales there would be two casts, and two all-gathers
        step(model)
        f8.update_delayed_scaling(model)
    graphs = graphs_of(step, model)
    found = {}
    for name, (gm,) in (("forward", graphs.forward), ("backward", graphs.backward)):
        found[f"{name} gathers"] = [
            [str(gemm.nodes[0].target) for gemm in inductors._find_consumer_matmuls(gather.res_node)]
            for gather in inductors.find_all_gather_patterns(gm.graph)
        ]
        found[f"{name} scatters"] = [
            [str(gemm.nodes[0].target) if (gemm := inductors._find_producer_matmul(scatter.input_node)) else "none"]
            for scatter in inductors.find_reduce_scatter_patterns(gm.graph)
        ]
    return found


SCALED_MM = "aten._scaled_mm.default"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_async_tensor_parallelism_finds_every_gemm(two: Ranks, recipe: str) -> None:
    """Two layers that gather one input with one scale share an all-gather in a graph."""
    for found in two(fusible, recipe, LAYOUTS["Shard(0)"]):
        assert found == {
            "forward gathers": [[SCALED_MM] * 2],
            "forward scatters": [[SCALED_MM]],
            "backward gathers": [[SCALED_MM]],
            "backward scatters": [[SCALED_MM]] * 2,
        }
