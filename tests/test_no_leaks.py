"""Nothing of a step outlives it (scenario 50): after backward gradients, output and loss are alive, nothing else, and
fifty steps leave as many bytes as five."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from delayed_checks import layers_of
from torch import Tensor, nn

import float8_compile as f8
from benchmarks.allocations import mark, memory_of, nbytes
from float8_compile import linear_function

WIDTH, HIDDEN, TOKENS = 32, 128, 24
WARM_UP, STEPS = 5, 50

# Dynamo asks an input that is no leaf for its gradient.
pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Block(nn.Module):
    """The MLP of a DeiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


@dataclass(frozen=True)
class Way:
    """To train the block."""

    recipe: str
    keeps: bool = False
    caches: bool = False
    flat: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = {"keep": self.keeps, "cache": self.caches, "flat": self.flat, "aot_eager": self.compiled}
        chosen = [word for word, is_so in words.items() if is_so]
        return ", ".join([self.recipe, *chosen, *(["float32"] if self.dtype is torch.float32 else [])])


class Training:
    """The block, its input, and a step."""

    def __init__(self, way: Way) -> None:
        torch.manual_seed(0)
        self.way = way
        self.model = Block().to(way.dtype)
        f8.convert_to_float8_training(self.model, config=way.recipe, recompute_weight_cast=not way.keeps)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.kept: list[Any] = []
        if way.caches:
            self.kept.append(f8.cache_weight_casts(self.model))
        if way.flat:
            self.kept.append(gradients := f8.FlatGradients(self.model.parameters()))
            gradients.attach(self.optimizer)
        self.x = torch.randn(TOKENS, WIDTH, dtype=way.dtype)
        self.run: Any = self.model
        if way.compiled:
            if way.recipe == "delayed":  # a compilation less
                with f8.calibrate(self.model):
                    self.forward_and_backward()
                self.optimizer.zero_grad()
            self.run = torch.compile(self.model, backend="aot_eager", fullgraph=True)

    def forward_and_backward(self) -> tuple[Tensor, Tensor]:
        output = self.run(self.x)
        loss = output.square().mean()
        loss.backward()
        return output, loss

    def step(self) -> None:
        output, loss = self.forward_and_backward()
        mark("after backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        del output, loss
        mark("after the step")

    def warmed_up(self) -> Training:
        for _ in range(WARM_UP):
            self.step()
        return self

    def expected_after_backward(self) -> int:
        """The output, the loss, and gradients where they have no buffer."""
        item = self.x.element_size()
        return nbytes(self.x) + item + (0 if self.way.flat else nbytes(*self.model.parameters()))


# Fifty steps

WAYS = [
    Way(recipe, keeps=caches != flat, caches=caches, flat=flat, compiled=compiled)
    for recipe, caches, flat, compiled in itertools.product(
        f8.Recipe.names(), (False, True), (False, True), (False, True)
    )
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_fifty_steps_leave_nothing_and_within_each_only_gradients_output_and_loss_outlive_backward(way: Way) -> None:
    training = Training(way).warmed_up()

    def rest() -> None:
        for _ in range(STEPS - WARM_UP):
            training.step()

    memory = memory_of(rest)
    assert memory.at("after backward") == [training.expected_after_backward()] * (STEPS - WARM_UP)
    assert memory.at("after the step") == [0] * (STEPS - WARM_UP)


# The other half: what keeps where those recompute, and the other way round; and float32

OTHER_WAYS = [
    Way(recipe, keeps=caches == flat, caches=caches, flat=flat)
    for recipe, caches, flat in itertools.product(f8.Recipe.names(), (False, True), (False, True))
] + [Way(recipe, flat=flat, dtype=torch.float32) for recipe in f8.Recipe.names() for flat in (False, True)]


def alive_after_backward(training: Training) -> int:
    return memory_of(training.forward_and_backward).alive


@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_after_one_backward_only_gradients_output_and_loss_are_alive(way: Way) -> None:
    training = Training(way).warmed_up()
    assert alive_after_backward(training) == training.expected_after_backward()


@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_what_the_first_backward_leaves_is_the_same(recipe: str) -> None:
    """Where delayed scales have no evidence yet."""
    training = Training(Way(recipe))
    assert alive_after_backward(training) == training.expected_after_backward()


@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_a_forward_pass_that_has_no_backward_leaves_the_output(recipe: str) -> None:
    training = Training(Way(recipe)).warmed_up()

    def forward() -> Tensor:
        with torch.no_grad():
            return training.run(training.x)

    assert memory_of(forward).alive == nbytes(training.x)
    assert memory_of(lambda: training.run(training.x).shape).alive == 0


# A leak would be seen


class Leaks(torch.autograd.Function):
    """Keeps a tensor on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept = x.clone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_a_function_that_keeps_a_tensor_on_ctx_would_be_seen(compiled: bool) -> None:
    training = Training(Way("tensorwise", compiled=compiled)).warmed_up()
    run = training.run
    training.run = lambda x: Leaks.apply(run(x))
    assert alive_after_backward(training) == training.expected_after_backward() + nbytes(training.x)


def leave_the_input_on_ctx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in "The GEMM that leaked": what backward reads, on ctx."""
    setup_context = linear_function.Float8LinearFunction.setup_context

    def leaking(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        setup_context(ctx, inputs, output)
        ctx.kept = {"operands": [torch.clone(inputs[0])]}

    monkeypatch.setattr(linear_function.Float8LinearFunction, "setup_context", staticmethod(leaking))


def test_a_leak_of_ours_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(Way("tensorwise")).warmed_up()
    leave_the_input_on_ctx(monkeypatch)
    inputs = TOKENS * (WIDTH + HIDDEN) * training.x.element_size()
    assert alive_after_backward(training) == training.expected_after_backward() + inputs


def test_a_step_that_leaves_something_would_be_seen() -> None:
    training, left = Training(Way("tensorwise")).warmed_up(), []

    def steps() -> None:
        for _ in range(3):
            training.step()
            left.append(torch.empty(1))

    assert memory_of(steps).at("after the step") == [0, 4, 8]


def test_a_cycle_would_be_seen() -> None:
    """What only a collection of garbage would free is alive until then."""

    def leave_a_cycle() -> None:
        cycle: list[Any] = [torch.empty(1)]
        cycle.append(cycle)

    assert memory_of(leave_a_cycle).alive == 4


# What a ctx knows


def tensors_in(thing: Any, seen: dict[int, Any] | None = None) -> dict[int, Tensor]:
    """Every tensor that can be reached from here, through attributes and containers."""
    seen = {} if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return {}
    seen[id(thing)] = thing
    parts: list[Any] = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    if isinstance(thing, dict):
        parts += [*thing.keys(), *thing.values()]
    elif isinstance(thing, (tuple, list, set, frozenset)):
        parts += thing
    found = {id(thing): thing} if isinstance(thing, Tensor) else {}
    for part in parts:
        found |= tensors_in(part, seen)
    return found


def step_tensors_on_ctx(training: Training) -> list[Tensor]:
    """What the layers' autograd Functions reach beyond what the layers have had before."""
    found: list[Tensor] = []
    for layer in layers_of(training.model):
        before = tensors_in(layer)
        assert len(before) >= 2, "weight and bias at least"
        y = layer(torch.randn(TOKENS, layer.in_features, dtype=training.way.dtype, requires_grad=True))
        assert type(y.grad_fn).__name__ == "Float8LinearFunctionBackward"
        assert "recipe" in vars(y.grad_fn)
        found += [tensor for key, tensor in tensors_in(vars(y.grad_fn)).items() if key not in before]
    return found


@pytest.mark.parametrize(
    "way",
    [
        Way(recipe, keeps, caches, flat)
        for recipe, keeps, caches, flat in itertools.product(
            f8.Recipe.names(), (False, True), (False, True), (False, True)
        )
    ],
    ids=str,
)
@pytest.mark.parametrize("warm", [False, True], ids=["at first", "later"])
def test_a_ctx_reaches_no_tensor_that_its_layer_has_not_had_before(way: Way, warm: bool) -> None:
    """Those that backward reads are saved through save_for_backward, which backward empties. The state of delayed
    scales, and slices of a flat buffer, outlive a step by right."""
    training = Training(way)
    if warm:
        training.warmed_up()
    assert step_tensors_on_ctx(training) == []


def test_a_tensor_on_a_ctx_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_the_input_on_ctx(monkeypatch)
    shapes = [tuple(tensor.shape) for tensor in step_tensors_on_ctx(Training(Way("delayed")))]
    assert shapes == [(TOKENS, WIDTH), (TOKENS, HIDDEN)]
