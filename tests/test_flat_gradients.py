"""FlatGradients: what backward leaves in the buffer, and what optimizers make of it, is what a list of gradients would
give, to the bit; and torch's other tools go on working."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from delayed_checks import assert_same_bits, batches, layers_of, mlp, state_of, weights_of
from delayed_checks import backward as backward_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import float8_compile as f8

WORDS, K, N = 11, 32, 48

# Dynamo asks an input that is no leaf for its gradient.
pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


def eagerly_and_traced(name: str, values: Iterable[str], traced: Iterable[str]) -> pytest.MarkDecorator:
    """Each value eagerly, and those of `traced` compiled, which takes its time."""
    ways = [(value, False) for value in values] + [(value, True) for value in traced]
    ids = [f"{value}-{'aot_eager' if compiled else 'eager'}" for value, compiled in ways]
    return pytest.mark.parametrize((name, "compiled"), ways, ids=ids)


def run_of(model: Any, compiled: bool) -> Any:
    compile: Any = torch.compile
    return compile(model, backend="aot_eager", fullgraph=True) if compiled else model


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Of the parameters; "mixed": the layers between float32 norm and embedding are bfloat16.
DTYPES: dict[str, Callable[[Any], Any]] = {
    "float32": lambda net: net,
    "bfloat16": lambda net: net.bfloat16(),
    "mixed": lambda net: (net.up.bfloat16(), net.down.bfloat16()),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Net(nn.Module):
    """Float8Linears beside other modules with parameters. The first is a single number, so that slices behind it lie
    at odd addresses. One layer takes no part, another can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.embedding = nn.Embedding(WORDS, K)
        self.up, self.norm, self.down = nn.Linear(K, N), nn.LayerNorm(N), nn.Linear(N, K)
        self.unused = nn.Linear(K, 3)
        self.head = nn.Linear(K, WORDS, bias=False)
        self.middle = True

    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words) * self.factor
        if self.middle:
            h = h + self.down(F.gelu(self.norm(self.up(h)).to(h.dtype)))
        return self.head(h)


def built(recipe: str = "tensorwise", dtype: str = "float32") -> Any:
    """The same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
    DTYPES[dtype](net)
    f8.convert_to_float8_training(net, config=recipe)
    return net


def texts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (3, 4), generator=generator) for _ in range(count)]


MICROBATCHES = texts(4)
STEPS = [MICROBATCHES[:2], MICROBATCHES[2:], MICROBATCHES[1:3]]


def backward(run: Callable[[Tensor], Tensor], words: Tensor) -> None:
    F.cross_entropy(run(words).float().flatten(0, -2), words.flatten()).backward()


class ListOfGradients:
    """What a FlatGradients stands in for: a list of accumulators, each a tensor of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = FLOAT32) -> None:
        self.parameters, self.dtype = list(parameters), dtype
        self.totals: dict[nn.Parameter, Tensor] = {}

    def add(self) -> None:
        """`.grad` of each parameter, after its backward."""
        for p in self.parameters:
            if p.grad is not None:
                self.totals.setdefault(p, torch.zeros(p.shape, dtype=self.dtype)).add_(p.grad)
                p.grad = None

    def cat(self) -> Tensor:
        return torch.cat(
            [self.totals.get(p, torch.zeros(p.shape, dtype=self.dtype)).flatten() for p in self.parameters]
        )

    def step(self, optimizer: Optimizer) -> None:
        for p, total in self.totals.items():
            p.grad = total.to(p.dtype)
        optimizer.step()
        for p in self.totals:
            p.grad = None

    def zero(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self.totals.clear()
        for total in self.totals.values():
            total.zero_()


def accumulated_in_a_list(model: nn.Module, run: Any, data: Iterable[Tensor], backward: Any = backward) -> Tensor:
    sums = ListOfGradients(model.parameters())
    for x in data:
        backward(run, x)
        sums.add()
    return sums.cat()


Steps = Iterable[Iterable[Tensor]]


def train_flat(
    model: nn.Module, optimizers: list[Optimizer], dtype: torch.dtype = FLOAT32, run: Any = None, steps: Steps = STEPS
) -> f8.FlatGradients:
    gradients = f8.FlatGradients(model.parameters(), dtype)
    for optimizer in optimizers:
        gradients.attach(optimizer)
    for microbatches in steps:
        for words in microbatches:
            backward(model if run is None else run, words)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def train_with_a_list(
    model: nn.Module, optimizers: list[Optimizer], dtype: torch.dtype = FLOAT32, steps: Steps = STEPS
) -> None:
    sums = ListOfGradients(model.parameters(), dtype)
    for microbatches in steps:
        for words in microbatches:
            backward(model, words)
            sums.add()
        for optimizer in optimizers:
            sums.step(optimizer)
        sums.zero()


def assert_shown(parameters: Iterable[nn.Parameter], gradients: f8.FlatGradients) -> None:
    """Each `.grad` is the parameter's slice: the same memory."""
    for p in parameters:
        assert p.grad is not None
        assert (p.grad.shape, p.grad.data_ptr()) == (p.shape, gradients[p].data_ptr())


# The same sums


@every_recipe
@every_dtype
def test_the_buffer_holds_what_a_list_of_float32_accumulators_would(recipe: str, dtype: str) -> None:
    net, twin = built(recipe, dtype), built(recipe, dtype)
    gradients = f8.FlatGradients(net.parameters())
    for words in MICROBATCHES:
        backward(net, words)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, MICROBATCHES))
    assert gradients.flat.count_nonzero() > 0.5 * gradients.flat.numel()


@pytest.mark.parametrize(
    ("recipe", "dtype", "cached"),
    [
        *((recipe, "bfloat16", False) for recipe in f8.Recipe.names()),
        ("delayed", "mixed", True),
    ],
)
def test_compiled_it_trains_to_the_bits_of_a_list_and_compiles_once(recipe: str, dtype: str, cached: bool) -> None:
    """Delayed scales that have no evidence at first cost one more. The buffer stays where it is."""
    net, twin = built(recipe, dtype), built(recipe, dtype)
    if cached:
        f8.cache_weight_casts(net)
    run, counter = compile_counted(net)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    address = gradients.flat.data_ptr()
    steps = [*STEPS, *STEPS, *STEPS, STEPS[0]]
    for number, microbatches in enumerate(steps):
        for words in microbatches:
            backward(run, words)
        optimizer.step()
        if number == 5:
            gradients.zero_()
        else:
            optimizer.zero_grad()
        assert gradients.flat.data_ptr() == address
        assert not gradients.flat.any()
    assert counter.frame_count == (2 if recipe == "delayed" else 1)
    train_with_a_list(twin, [AdamW(twin.parameters(), lr=1e-2)], steps=steps)
    assert_same_bits({**weights_of(net), **state_of(net)}, {**weights_of(twin), **state_of(twin)})


def test_inductors_code_adds_up_the_same() -> None:
    data = [x.bfloat16() for x in batches(4, 16, K)]
    model = mlp(K, N, K, config="tensorwise").bfloat16()
    run = torch.compile(model, fullgraph=True)
    expected = accumulated_in_a_list(model, run, data, backward_of)
    gradients = f8.FlatGradients(model.parameters())
    for x in data:
        backward_of(run, x)
    assert torch.equal(gradients.flat, expected)


def test_gradients_may_be_summed_up_in_any_floating_point_dtype() -> None:
    for dtype in (BFLOAT16, torch.float16, torch.float64):
        net, twin = built(dtype="bfloat16"), built(dtype="bfloat16")
        gradients, sums = f8.FlatGradients(net.parameters(), dtype), ListOfGradients(twin.parameters(), dtype)
        for words in MICROBATCHES:
            backward(net, words)
            backward(twin, words)
            sums.add()
        assert gradients.flat.dtype is dtype
        assert torch.equal(gradients.flat, sums.cat())


def of_zeros(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)


STARTS: dict[str, Callable[[Any], None]] = {"without gradients": lambda net: None, "gradients of zeros": of_zeros}


@every_recipe
@every_dtype
def test_it_is_the_same_from_none_and_from_zeros(recipe: str, dtype: str) -> None:
    """Scenario 20."""
    sums = []
    for start in STARTS.values():
        net = built(recipe, dtype)
        start(net)
        gradients = f8.FlatGradients(net.parameters())
        for words in MICROBATCHES:
            backward(net, words)
        sums.append(gradients.flat)
    assert torch.equal(*sums)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("recipe", "bound"),
    [("high precision", 1e-6), ("calibrated", 1e-6), *((recipe, 0.1) for recipe in f8.Recipe.names())],
)
def test_four_microbatches_are_one_batch_four_times_as_long(recipe: str, bound: float, start: str) -> None:
    """Scenario 20. With equal scales but for the order of float32 sums; with those of each microbatch's own amaxes
    within two roundings to float8, whose relative error is some percent."""
    results = []
    for data in (MICROBATCHES, [torch.cat(MICROBATCHES)]):
        net = built("tensorwise" if recipe == "high precision" else "delayed" if recipe == "calibrated" else recipe)
        if recipe == "calibrated":
            with f8.calibrate(net):
                backward(net, torch.cat(MICROBATCHES))
            net.zero_grad()
        for layer in layers_of(net):
            layer.enabled = recipe != "high precision"
        STARTS[start](net)
        gradients = f8.FlatGradients(net.parameters())
        for words in data:
            loss = F.cross_entropy(net(words).flatten(0, -2), words.flatten(), reduction="sum")
            loss.backward()
        results.append(gradients.flat)
    assert relative_error(*results) < bound


# Optimizers

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW, foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW, a group for each parameter": lambda p: AdamW([{"params": [one]} for one in p], lr=1e-2),
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD, momentum, decay": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adafactor": lambda p: Adafactor(p, lr=1e-2),
}
every_buffer = pytest.mark.parametrize(
    ("dtype", "buffer"), [("float32", FLOAT32), ("bfloat16", FLOAT32), ("mixed", FLOAT32), ("bfloat16", BFLOAT16)]
)


@every_buffer
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_attached_optimizer_steps_as_from_a_list(name: str, dtype: str, buffer: torch.dtype) -> None:
    """Summed up in the buffer's dtype, then cast to the parameter's."""
    net, twin = built("delayed", dtype), built("delayed", dtype)
    initial = weights_of(net)
    train_flat(net, [OPTIMIZERS[name](list(net.parameters()))], buffer)
    train_with_a_list(twin, [OPTIMIZERS[name](list(twin.parameters()))], buffer)
    assert_same_bits({**weights_of(net), **state_of(net)}, {**weights_of(twin), **state_of(twin)})
    moved = {fqn.split(".")[0] for fqn, weight in weights_of(net).items() if not torch.equal(weight, initial[fqn])}
    assert moved == {"factor", "embedding", "up", "norm", "down", "head"}, "weight decay doesn't reach the unused layer"


PARTS: dict[str, Callable[[Any], list[Optimizer]]] = {
    "a subset": lambda net: [AdamW([*net.up.parameters(), net.factor], lr=1e-2)],
    "two optimizers": lambda net: [
        AdamW([*net.up.parameters(), net.factor], lr=1e-2),
        SGD([*net.down.parameters(), *net.embedding.parameters()], lr=1e-2, momentum=0.9),
    ],
    "in another order": lambda net: [AdamW(list(net.parameters())[::-1], lr=1e-2)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
def test_optimizers_of_parts_step_with_their_parts(parts: str, dtype: str) -> None:
    net, twin = built(dtype=dtype), built(dtype=dtype)
    gradients, sums = f8.FlatGradients(net.parameters()), ListOfGradients(twin.parameters())
    optimizers, expected = PARTS[parts](net), PARTS[parts](twin)
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for optimizer in optimizers:
        gradients.attach(optimizer)
    for microbatches in STEPS:
        for words in microbatches:
            backward(net, words)
            backward(twin, words)
            sums.add()
        for optimizer, other in zip(optimizers, expected, strict=True):
            optimizer.step()
            sums.step(other)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert not any(gradients[p].any() for p in held)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            if p in held:
                sums.totals.pop(q, None)  # the others are summed up on and on
            elif q in sums.totals:
                assert torch.equal(gradients[p], sums.totals[q])
    assert_same_bits(weights_of(net), weights_of(twin))


def test_an_optimizer_may_hold_parameters_that_have_no_slice() -> None:
    net, twin = built(), built()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.up.parameters())
    gradients.attach(optimizer)
    for microbatches in STEPS:
        for words in microbatches:
            backward(net, words)
        assert_shown(net.up.parameters(), gradients)
        assert net.down.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
    train_with_a_list(twin, [AdamW(twin.parameters(), lr=1e-2)])
    assert_same_bits(weights_of(net), weights_of(twin))


def test_a_group_may_be_added_after_attaching() -> None:
    net, twin = built(dtype="bfloat16"), built(dtype="bfloat16")
    optimizer = AdamW(net.up.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    optimizer.add_param_group({"params": list(net.head.parameters())})
    backward(net, MICROBATCHES[0])
    optimizer.step()
    train_with_a_list(
        twin, [AdamW([*twin.up.parameters(), *twin.head.parameters()], lr=1e-2)], steps=[MICROBATCHES[:1]]
    )
    assert_same_bits(weights_of(net), weights_of(twin))


@pytest.mark.parametrize("removed", [0, 1])
def test_one_optimizer_steps_from_two_buffers_and_from_the_one_that_is_left(removed: int) -> None:
    """As for a model on two devices, with a buffer for each."""
    net, twin = built(), built()
    optimizer, expected = SGD(net.parameters(), lr=1e-2), SGD(twin.parameters(), lr=1e-2)
    names = [name for name, _ in net.named_parameters()]
    halves = [[p for name, p in net.named_parameters() if (name in names[:4]) == first] for first in (True, False)]
    buffers = [f8.FlatGradients(half) for half in halves]
    for gradients in buffers:
        gradients.attach(optimizer)
    for number, microbatches in enumerate(STEPS):
        if number == 1:
            buffers.pop(removed).remove()
        for words in microbatches:
            backward(net, words)
        optimizer.step()
        optimizer.zero_grad()
        assert not any(gradients.flat.any() for gradients in buffers)
    train_with_a_list(twin, [expected])
    assert_same_bits(weights_of(net), weights_of(twin))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_got_no_gradient_in_a_step_is_skipped_as_torch_skips_it(dtype: str, set_to_none: bool) -> None:
    """A part that one step uses and the next does not: with None its weights stay, with zeros they decay and the
    momentum moves them on."""
    net, twin = built(dtype=dtype), built(dtype=dtype)
    optimizer, expected = (AdamW(m.parameters(), lr=1e-2, weight_decay=0.5) for m in (net, twin))
    gradients, sums = f8.FlatGradients(net.parameters()), ListOfGradients(twin.parameters())
    gradients.attach(optimizer)
    was_used = False
    for uses in (False, True, False, True):
        net.middle = twin.middle = uses
        before = weights_of(net)
        backward(net, MICROBATCHES[0])
        backward(twin, MICROBATCHES[0])
        optimizer.step()
        sums.add()
        sums.step(expected)
        optimizer.zero_grad(set_to_none)
        sums.zero(set_to_none)
        assert_same_bits(weights_of(net), weights_of(twin))
        assert not gradients.flat.any()
        assert not torch.equal(net.head.weight, before["head.weight"])
        assert torch.equal(net.unused.weight, before["unused.weight"])
        was_used |= uses
        stays = not uses and (set_to_none or not was_used)
        assert torch.equal(net.up.weight, before["up.weight"]) == stays


@pytest.mark.parametrize("order", ["scheduler, then attach", "attach, then scheduler"])
def test_a_learning_rate_scheduler_works_in_either_order(order: str) -> None:
    """torch warns where the scheduler does not see the optimizer's steps."""
    net, twin = built(dtype="bfloat16"), built(dtype="bfloat16")
    optimizer, expected = SGD(net.parameters(), lr=1e-1), SGD(twin.parameters(), lr=1e-1)
    gradients, sums = f8.FlatGradients(net.parameters()), ListOfGradients(twin.parameters())
    if order == "attach, then scheduler":
        gradients.attach(optimizer)
    schedulers = [StepLR(one, 1, gamma=0.5) for one in (optimizer, expected)]
    gradients.attach(optimizer)
    for microbatches in STEPS:
        for words in microbatches:
            backward(net, words)
            backward(twin, words)
            sums.add()
        optimizer.step()
        optimizer.zero_grad()
        sums.step(expected)
        sums.zero()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert_same_bits(weights_of(net), weights_of(twin))


def test_a_closure_may_compute_gradients_of_the_parameters_dtype() -> None:
    runs = []
    for flat in (False, True):
        net = built()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-1, max_iter=3)
        if flat:
            f8.FlatGradients(net.parameters()).attach(optimizer)

        def closure(net: Any = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(MICROBATCHES[0]).flatten(0, -2), MICROBATCHES[0].flatten())
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        runs.append(weights_of(net))
    assert_same_bits(*runs)


def test_slices_lie_in_memory_as_their_parameters_do() -> None:
    """A fused optimizer goes through parameter and gradient from one end to the other, whatever their strides. Here a
    convolution in channels_last, and a transposed weight."""
    runs = []
    for flat in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, K))
        f8.convert_to_float8_training(model)
        model.to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        if flat:
            f8.FlatGradients(model.parameters()).attach(optimizer)
        for x in batches(2, 5, 3, 4, 4):
            backward_of(model, x)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(weights_of(model))
    assert_same_bits(*runs)


# Which parameters


def test_frozen_parameters_have_no_slice_and_stay() -> None:
    net, twin = built(), built()
    for model in (net, twin):
        model.up.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
    initial = weights_of(net)
    gradients = train_flat(net, [AdamW(net.parameters(), lr=1e-2)])
    train_with_a_list(twin, [AdamW(twin.parameters(), lr=1e-2)])
    assert_same_bits(weights_of(net), weights_of(twin))
    frozen = [net.up.weight, net.up.bias, net.norm.bias]
    assert gradients.flat.numel() == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert torch.equal(net.up.weight, initial["up.weight"])
    for parameter in frozen:
        assert parameter.grad is None
        with pytest.raises(KeyError):
            gradients[parameter]


UNFROZEN, FROZEN = "frozen, unfrozen, frozen", "trained, frozen, trained"


@pytest.mark.parametrize(
    ("what", "dtype", "compiled"),
    [*itertools.product([UNFROZEN, FROZEN], ["float32", "bfloat16"], [False]), (FROZEN, "bfloat16", True)],
)
def test_what_is_frozen_or_unfrozen_later_trains_or_not_as_without(what: str, dtype: str, compiled: bool) -> None:
    """What was frozen when the buffer was made has no slice, and trains by its own `.grad`, which sums up in its own
    dtype: hence one microbatch a step."""
    net, twin = built(dtype=dtype), built(dtype=dtype)
    optimizer, expected = AdamW(net.parameters(), lr=1e-2), AdamW(twin.parameters(), lr=1e-2)
    run = run_of(net, compiled)
    gradients = None
    for trains in (False, True, False) if what == UNFROZEN else (True, False, True):
        for model in (net, twin):
            model.up.requires_grad_(trains)
            model.norm.requires_grad_(trains)
        if gradients is None:
            gradients = f8.FlatGradients(net.parameters())
            gradients.attach(optimizer)
        before = weights_of(net)
        backward(run, MICROBATCHES[0])
        optimizer.step()
        optimizer.zero_grad()
        train_with_a_list(twin, [expected], steps=[MICROBATCHES[:1]])
        assert_same_bits(weights_of(net), weights_of(twin))
        assert not gradients.flat.any()
        for name in ("up.weight", "up.bias", "norm.weight"):
            assert torch.equal(net.get_parameter(name), before[name]) != trains


class Tied(nn.Module):
    """Its two parts have one weight."""

    def __init__(self, kind: str, dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(K, K) if kind == "an embedding and a layer" else nn.Linear(K, K)
        self.second = nn.Linear(K, K)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight)
        if tied:
            self.second.weight = self.first.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x) if isinstance(self.first, nn.Linear) else F.embedding(x.argmax(-1), self.first.weight)
        return self.second(F.gelu(first))


@eagerly_and_traced("recipe", f8.Recipe.names(), traced=["delayed"])
@pytest.mark.parametrize("kind", ["two layers", "an embedding and a layer"])
def test_tied_weights_get_both_gradients_in_one_slice(kind: str, recipe: str, compiled: bool) -> None:
    """In float32, in the order of backward; torch would round their sum to bfloat16 first."""
    models: list[Any] = []
    for tied in (True, False):
        torch.manual_seed(0)
        models.append(f8.convert_to_float8_training(Tied(kind, BFLOAT16, tied), config=recipe))
    tied_model, apart = models
    data = [x.bfloat16() for x in batches(3, 8, K)]
    gradients = f8.FlatGradients(tied_model.parameters())
    run = run_of(tied_model, compiled)
    expected = torch.zeros(K, K)
    for x in data:
        backward_of(run, x)
        backward_of(apart, x)
        for layer in (apart.second, apart.first):
            expected += layer.weight.grad
            layer.weight.grad = None
    assert len(gradients.flat) == sum(p.numel() for p in tied_model.parameters())
    assert torch.equal(gradients[tied_model.first.weight], expected)


@eagerly_and_traced("recipe", f8.Recipe.names(), traced=["delayed"])
def test_a_layer_that_is_called_twice_adds_up_both_gradients(recipe: str, compiled: bool) -> None:
    """But for the order of float32 sums."""
    shared = mlp(K, K, config=recipe)
    twin = copy.deepcopy(shared)

    def twice(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(F.gelu(model(x)))

    gradients = f8.FlatGradients(shared.parameters())
    run = run_of(twice(shared), compiled)
    for x in batches(3, 8, K):
        backward_of(run, x)
        backward_of(twice(twin), x)
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert relative_error(gradients.flat, expected) < 1e-6


SHAPES = [(), (3,), (0,), (5, 1), (0, 4), (2, 3, 5), (1,), (16, 16)]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_parameters_of_any_shape_have_slices_in_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = SGD(parameters, lr=0.5)
    gradients = f8.FlatGradients(parameters)
    gradients.attach(optimizer)
    for _ in range(2):
        torch.stack([p.square().sum() for p in parameters]).sum().backward()
    assert torch.equal(gradients.flat, torch.cat([4 * p.detach().flatten() for p in parameters]))
    position = 0
    for p in parameters:
        assert (gradients[p].shape, gradients[p].dtype) == (p.shape, FLOAT32)
        if p.numel():
            assert gradients[p].data_ptr() == gradients.flat[position:].data_ptr()
        position += p.numel()
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(p, -was) for p, was in zip(parameters, before, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_layers_of_odd_sizes_add_up_too(compiled: bool) -> None:
    """No slice but the first lies at an address that is a multiple of 16."""
    model, twin = (mlp(K, 5, 17, 3, config="tensorwise").bfloat16() for _ in range(2))
    for one in (model, twin):
        one[0].bias = nn.Parameter(one[0].bias[:1].detach().clone())
    data = [x.bfloat16() for x in batches(3, 7, K)]
    gradients = f8.FlatGradients(model.parameters())
    run = run_of(model, compiled)
    for x in data:
        backward_of(run, x)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, data, backward_of))


def test_the_buffer_is_in_the_order_of_the_parameters_each_once() -> None:
    net = built()
    given = [net.head.weight, net.up.bias, net.head.weight, net.up.weight]
    gradients = f8.FlatGradients(iter(given))
    backward(net, MICROBATCHES[0])
    parts = gradients.flat.split([WORDS * K, N, N * K])
    for parameter, part in zip([net.head.weight, net.up.bias, net.up.weight], parts, strict=True):
        assert torch.equal(gradients[parameter], part.view(parameter.shape))
        assert part.any()
    gradients[net.up.bias].fill_(2.0)
    assert (parts[1] == 2).all()


@every_dtype
def test_gradients_that_were_there_before_are_taken_over(dtype: str) -> None:
    net, twin = built(dtype=dtype), built(dtype=dtype)
    backward(net, MICROBATCHES[0])
    gradients = f8.FlatGradients(net.parameters())
    for words in MICROBATCHES[1:]:
        backward(net, words)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, MICROBATCHES))
    assert_same_bits(weights_of(net), weights_of(twin))


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_embeddings_may_be_sparse(sparse: bool) -> None:
    embedding = nn.Embedding(5, 4, sparse=sparse)
    gradients = f8.FlatGradients(embedding.parameters())
    for _ in range(2):
        embedding(torch.tensor([1, 3, 1])).sum().backward()
    assert gradients.flat.view(5, 4)[:, 0].tolist() == [0, 4, 0, 2, 0]
    assert_shown(embedding.parameters(), gradients)


# .grad


@every_dtype
def test_grad_is_the_slice_where_dtypes_agree_and_else_none(dtype: str) -> None:
    net = built(dtype=dtype)
    gradients = f8.FlatGradients(net.parameters())
    assert all(p.grad is None for p in net.parameters())
    for words in MICROBATCHES[:2]:
        backward(net, words)
        for name, parameter in net.named_parameters():
            if parameter.dtype is FLOAT32 and "unused" not in name:
                assert_shown([parameter], gradients)
            else:
                assert parameter.grad is None
    optimizer = SGD(net.parameters(), lr=1e-2)
    gradients.attach(optimizer)
    seen: list[tuple[torch.dtype, Tensor | None]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend((p.dtype, p.grad) for p in net.parameters()))
    optimizer.step()
    assert [dtype if grad is None else grad.dtype for dtype, grad in seen] == [p.dtype for p in net.parameters()]
    assert sum(grad is None for _, grad in seen) == 2, "the unused layer's"
    for parameter in net.parameters():
        assert (parameter.grad is None) == (parameter.dtype is not FLOAT32 or parameter in set(net.unused.parameters()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["zero_()", "zero_grad()", "zero_grad(set_to_none=False)"])
def test_zeroing_begins_anew(how: str, dtype: str) -> None:
    net, twin = built(dtype=dtype), built(dtype=dtype)
    optimizer = SGD(net.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    backward(net, MICROBATCHES[0])
    if how == "zero_()":
        gradients.zero_()
    else:
        optimizer.zero_grad(how == "zero_grad()")
    assert not gradients.flat.any()
    if how == "zero_grad(set_to_none=False)" and dtype == "float32":
        assert_shown(net.up.parameters(), gradients)
    else:
        assert all(p.grad is None for p in net.parameters())
    for words in MICROBATCHES[1:]:
        backward(net, words)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, MICROBATCHES[1:]))


# Clipping and scaling

NORMS = [(2.0, 0.1), (2.0, 1e6), (1.0, 1.0), (math.inf, 1e-3)]


@pytest.mark.parametrize(("norm_type", "max_norm"), NORMS)
@pytest.mark.parametrize(("buffer", "bound"), [(FLOAT32, 1e-6), (BFLOAT16, 2**-6)])
def test_clipping_is_torchs(norm_type: float, max_norm: float, buffer: torch.dtype, bound: float) -> None:
    """But for the order of sums: torch takes the norm of each gradient's norm, here is one. In bfloat16 either is
    rounded to 8 bits, theirs twice, and then the factor and the product."""
    dtype = "float32" if buffer is FLOAT32 else "bfloat16"
    net, twin = built(dtype=dtype), built(dtype=dtype)
    gradients = f8.FlatGradients(net.parameters(), buffer)
    backward(net, MICROBATCHES[0])
    backward(twin, MICROBATCHES[0])
    before = gradients.flat.clone()
    norm = gradients.clip_grad_norm_(max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=bound, atol=0)
    clipped = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in twin.parameters()])
    torch.testing.assert_close(gradients.flat, clipped, rtol=bound, atol=0)
    assert torch.equal(gradients.flat, before) == (max_norm > 1e3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_what_is_not_finite_is_torchs_too(bad: float) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    gradients = f8.FlatGradients(parameters)
    torch.cat([p.view(-1) for p in parameters]).sum().backward()
    gradients.flat[1] = bad
    before = gradients.flat.clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        gradients.clip_grad_norm_(1.0, error_if_nonfinite=True)
    torch.testing.assert_close(gradients.flat, before, rtol=0, atol=0, equal_nan=True)
    twins = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    for twin, part in zip(twins, before.split([3, 4]), strict=True):
        twin.grad = part.clone()
    norm, expected = gradients.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    clipped = torch.cat([twin.grad for twin in twins if twin.grad is not None])
    torch.testing.assert_close(gradients.flat, clipped, rtol=0, atol=0, equal_nan=True)


def test_torchs_own_clipping_reaches_the_buffer_where_dtypes_agree() -> None:
    net, twin = built(), built()
    gradients = f8.FlatGradients(net.parameters())
    for words in MICROBATCHES:
        backward(net, words)
    expected = accumulated_in_a_list(twin, twin, MICROBATCHES)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm > 0.1
    torch.testing.assert_close(gradients.flat, expected * (0.1 / (norm + 1e-6)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_grad_scaler_unscales_the_buffer_and_skips_steps(recipe: str, fused: bool) -> None:
    """Where dtypes agree. The second of three steps overflows."""
    runs = []
    for flat in (False, True):
        net = built(recipe)
        optimizer, scaler = (
            AdamW(net.parameters(), lr=1e-2, fused=fused),
            torch.amp.GradScaler("cpu", init_scale=2.0**10),
        )
        gradients = f8.FlatGradients(net.parameters()) if flat else None
        if gradients is not None:
            gradients.attach(optimizer)
        history = []
        for number, microbatches in enumerate(STEPS):
            for words in microbatches:
                loss = F.cross_entropy(net(words).flatten(0, -2), words.flatten())
                scaler.scale(loss * (math.inf if number == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append(weights_of(net))
            assert gradients is None or not gradients.flat.any()
        assert_same_bits(history[0], history[1])
        assert not torch.equal(history[1]["up.weight"], history[2]["up.weight"])
        assert scaler.get_scale() == 2.0**9
        runs.append({**history[2], **state_of(net)})
    assert_same_bits(*runs)


class NoItem(TorchDispatchMode):
    """Raises where a tensor's number is read into Python: on a GPU that waits for all of the work so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a number was read"
        return func(*args, **(kwargs or {}))


@every_recipe
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_number_is_read_into_python(recipe: str, dtype: str) -> None:
    net = built(recipe, dtype)
    optimizer = SGD(net.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    with NoItem():
        for words in MICROBATCHES[:2]:
            backward(net, words)
            gradients.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            gradients.zero_()
        with pytest.raises(AssertionError, match="a number was read"):
            gradients.flat.sum().item()


# Checkpointing

GEMMS = f8.sac_save_ops()
Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def with_policy(decide: Callable[[Any], CheckpointPolicy]) -> Wrap:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: decide(op))
    return lambda model: lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts)


CHECKPOINTS: dict[str, Wrap] = {
    "not reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    "a policy that saves GEMMs": with_policy(
        lambda op: CheckpointPolicy.MUST_SAVE if op in GEMMS else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "a policy that saves everything": with_policy(lambda op: CheckpointPolicy.MUST_SAVE),
}


@every_recipe
@pytest.mark.parametrize("wrap", CHECKPOINTS)
def test_checkpointing_adds_up_once(wrap: str, recipe: str) -> None:
    model, twin = mlp(K, N, K, config=recipe), mlp(K, N, K, config=recipe)
    data = [x.requires_grad_() for x in batches(4, 8, K)]
    gradients = f8.FlatGradients(model.parameters())
    for x in data:
        backward_of(CHECKPOINTS[wrap](model), x)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, data, backward_of))


@pytest.mark.parametrize("wrap", ["not reentrant", "a policy that saves GEMMs"])
def test_compiled_checkpointing_adds_up_once(wrap: str) -> None:
    model, twin = mlp(K, N, K, config="delayed"), mlp(K, N, K, config="delayed")
    data = batches(4, 8, K)
    gradients = f8.FlatGradients(model.parameters())
    run, counter = compile_counted(CHECKPOINTS[wrap](model))
    for x in data:
        backward_of(run, x)
    assert counter.frame_count == 1
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, data, backward_of))


@every_recipe
@pytest.mark.parametrize("keeps", [False, True], ids=["recompute", "keep"])
def test_cached_weights_and_delayed_scales_move_on_after_its_step(recipe: str, keeps: bool) -> None:
    net, twin = built(recipe, "bfloat16"), built(recipe, "bfloat16")
    for layer in layers_of(net):
        layer.recompute_weight_cast = not keeps
    f8.cache_weight_casts(net)
    train_flat(net, [AdamW(net.parameters(), lr=1e-2, fused=True)])
    train_with_a_list(twin, [AdamW(twin.parameters(), lr=1e-2, fused=True)])
    assert_same_bits({**weights_of(net), **state_of(net)}, {**weights_of(twin), **state_of(twin)})
    words = MICROBATCHES[0]
    assert torch.equal(net(words), twin(words))


# Copies, files, other weights


def has_slice(model: nn.Module) -> bool:
    return any(getattr(parameter, "flat_gradient", None) is not None for parameter in model.parameters())


def saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_model_and_optimizer_trains_by_its_own_gradients(how: str, cached: bool) -> None:
    net, twin = built("delayed"), built("delayed")
    optimizer, expected = AdamW(net.parameters(), lr=1e-2), AdamW(twin.parameters(), lr=1e-2)
    if cached:
        f8.cache_weight_casts(net)
    gradients = train_flat(net, [optimizer])
    train_with_a_list(twin, [expected])
    backward(net, MICROBATCHES[0])
    held, weights = gradients.flat.clone(), weights_of(net)

    copied, copied_optimizer = COPIES[how]((net, optimizer))
    assert has_slice(net)
    assert not has_slice(copied)
    copied_optimizer.zero_grad()
    state_before_backward = {**state_of(twin), **weights_of(twin)}
    for words in STEPS[1]:
        backward(copied, words)
    assert all(p.grad is not None for name, p in copied.named_parameters() if "unused" not in name)
    copied_optimizer.step()
    assert torch.equal(gradients.flat, held), "the original is not concerned"
    assert_same_bits(weights_of(net), weights)
    backward(twin, MICROBATCHES[0])  # as net, for its amaxes
    twin.zero_grad()
    train_with_a_list(twin, [expected], steps=[STEPS[1]])
    assert_same_bits({**weights_of(copied), **state_of(copied)}, {**weights_of(twin), **state_of(twin)})
    assert not torch.equal(state_before_backward["up.weight"], weights_of(twin)["up.weight"])


def test_checkpoints_know_nothing_of_it_and_load_into_what_has_it() -> None:
    net, plain = built("delayed"), built("delayed")
    optimizer, other = AdamW(net.parameters(), lr=1e-2), AdamW(plain.parameters(), lr=1e-2)
    gradients = train_flat(net, [optimizer])
    train_with_a_list(plain, [other])
    file = io.BytesIO()
    torch.save({"model": plain.state_dict(), "optimizer": other.state_dict()}, file)
    assert_same_bits(dict(net.state_dict()), dict(plain.state_dict()))
    assert str(optimizer.state_dict()) == str(other.state_dict())
    backward(net, MICROBATCHES[0])
    optimizer.step()  # away from the file
    optimizer.zero_grad()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for words in STEPS[0]:
        backward(net, words)
    optimizer.step()
    optimizer.zero_grad()
    assert not gradients.flat.any()
    train_with_a_list(plain, [other], steps=STEPS[:1])
    assert_same_bits({**weights_of(net), **state_of(net)}, {**weights_of(plain), **state_of(plain)})


@eagerly_and_traced("recipe", f8.Recipe.names(), traced=["delayed"])
def test_other_weights_leave_the_buffer_alone(recipe: str, compiled: bool) -> None:
    """Through functional_call. They get their own gradients."""
    net, twin = built(recipe), built(recipe)
    gradients = f8.FlatGradients(net.parameters())

    def with_weights(words: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, weights, (words,))

    weights = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
    run = run_of(with_weights, compiled)
    for words in MICROBATCHES[:2]:
        backward(lambda words: run(words, weights), words)
    assert not gradients.flat.any()
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    for words in MICROBATCHES[:2]:
        backward(twin, words)
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(weights[name].grad, parameter.grad), name  # type: ignore[arg-type]


def test_torch_func_leaves_the_buffer_alone() -> None:
    net = built()
    gradients = f8.FlatGradients(net.parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(net, weights, (MICROBATCHES[0],))
        return F.cross_entropy(logits.flatten(0, -2), MICROBATCHES[0].flatten())

    results = torch.func.grad(loss)(dict(net.named_parameters()))
    assert not gradients.flat.any()
    backward(net, MICROBATCHES[0])
    for name, parameter in net.named_parameters():
        assert torch.equal(gradients[parameter], results[name]), name


def test_high_precision_layers_are_added_up_too() -> None:
    net, twin = built(), built()
    gradients = f8.FlatGradients(net.parameters())
    with f8.float8_disabled(net), f8.float8_disabled(twin):
        for words in MICROBATCHES:
            backward(net, words)
        assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, MICROBATCHES))


# The end of it


@eagerly_and_traced("dtype", DTYPES, traced=["mixed"])
def test_remove_gives_gradients_back_to_grad(dtype: str, compiled: bool) -> None:
    net, twin = built(dtype=dtype), built(dtype=dtype)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    run = run_of(net, compiled)
    gradients = train_flat(net, [optimizer], run=run)
    train_with_a_list(twin, [expected := AdamW(twin.parameters(), lr=1e-2)])
    backward(run, MICROBATCHES[0])
    held = gradients.flat.clone()
    gradients.remove()
    assert not has_slice(net)
    assert torch.equal(gradients.flat, held)
    optimizer.zero_grad()
    assert torch.equal(gradients.flat, held), "zero_grad is the optimizer's own again"
    for words in STEPS[0]:
        backward(run, words)
        backward(twin, words)
    assert torch.equal(gradients.flat, held)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    optimizer.step()
    expected.step()
    assert_same_bits(weights_of(net), weights_of(twin))


def test_after_remove_others_may_come_and_a_second_remove_does_nothing() -> None:
    net, twin = built(), built()
    optimizer = SGD(net.parameters(), lr=1e-2)
    first = f8.FlatGradients(net.parameters())
    first.attach(optimizer)
    first.remove()
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    first.remove()
    for words in STEPS[0]:
        backward(net, words)
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, STEPS[0]))
    assert not first.flat.any()
    optimizer.step()
    optimizer.zero_grad()
    assert not gradients.flat.any()


def test_remove_leaves_what_others_made_of_zero_grad() -> None:
    net, calls = built(), list[bool]()
    optimizer = SGD(net.parameters(), lr=1e-2)
    plain = optimizer.zero_grad

    def own(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        plain(set_to_none)

    optimizer.zero_grad = own  # type: ignore[method-assign]
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    backward(net, MICROBATCHES[0])
    optimizer.zero_grad()
    assert not gradients.flat.any()
    gradients.remove()
    optimizer.zero_grad(set_to_none=False)
    assert calls == [True, False]


def test_the_buffer_lives_as_long_as_the_parameters_and_no_longer() -> None:
    net = built()
    optimizer = SGD(net.parameters(), lr=1e-2)
    flat = weakref.ref(train_flat(net, [optimizer]).flat)
    del optimizer
    gc.collect()
    assert flat() is not None
    backward(net, MICROBATCHES[0])
    assert flat().any()  # type: ignore[union-attr]
    del net
    gc.collect()
    assert flat() is None


# Misuse


def assert_untouched(*models: nn.Module) -> None:
    """As if nobody had tried: backward gives `.grad`."""
    for model in models:
        assert not has_slice(model)
        backward(model, MICROBATCHES[0])
        assert all(p.grad is not None for name, p in model.named_parameters() if "unused" not in name)


def used_up(net: nn.Module) -> Any:
    parameters = net.parameters()
    list(parameters)
    return parameters


def on_two_devices(net: nn.Module) -> Any:
    return [*net.parameters(), nn.Parameter(torch.empty(3, device="meta"))]


def frozen(net: nn.Module) -> Any:
    return [nn.Parameter(torch.ones(2), requires_grad=False)]


REFUSED: dict[str, tuple[Callable[[Any], Any], torch.dtype, type[Exception], str]] = {
    "a used-up iterator": (used_up, FLOAT32, ValueError, "no parameter requires a gradient.*an iterator .* used up"),
    "frozen ones": (frozen, FLOAT32, ValueError, "no parameter requires a gradient"),
    "two devices": (on_two_devices, FLOAT32, ValueError, "are on cpu, meta; make one for each device"),
    "an integer dtype": (Net.parameters, torch.int32, TypeError, r"dtype=torch.int32\): expected a floating-point"),
    "a complex dtype": (Net.parameters, torch.complex64, TypeError, r"dtype=torch.complex64\): expected a floating-"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name_and_change_nothing(name: str) -> None:
    make, dtype, error, message = REFUSED[name]
    net = built()
    with pytest.raises(error, match=message):
        f8.FlatGradients(make(net), dtype)
    assert_untouched(net)


def test_a_second_buffer_for_a_parameter_is_refused_and_the_first_goes_on() -> None:
    net, other = built(), built()
    first = f8.FlatGradients(net.up.parameters())
    message = r"shape \(48, 32\) has a slice of another FlatGradients; remove\(\) that one first"
    with pytest.raises(ValueError, match=message):
        f8.FlatGradients([*other.parameters(), *net.parameters()])
    assert_untouched(other)
    backward(net, MICROBATCHES[0])
    assert first.flat.any()
    assert_shown(net.up.parameters(), first)
    assert net.down.weight.grad is not None
    first.remove()
    f8.FlatGradients(net.parameters())


@eagerly_and_traced("dtype", ["float32", "bfloat16"], traced=["bfloat16"])
@pytest.mark.parametrize("forgets", [nn.Module.zero_grad, lambda net: None], ids=["model.zero_grad()", "nothing"])
def test_a_buffer_that_nobody_zeroed_after_a_step_is_noticed(forgets: Any, dtype: str, compiled: bool) -> None:
    """And zeroing it is all that is to be done."""
    net, twin = built(dtype=dtype), built(dtype=dtype)
    run = run_of(net, compiled)
    optimizer, expected = SGD(net.parameters(), lr=1e-2), SGD(twin.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    backward(run, MICROBATCHES[0])
    optimizer.step()
    before = weights_of(net)
    forgets(net)
    with pytest.raises(
        RuntimeError, match=r"of a parameter of shape \(.*\) came while .*optimizer.zero_grad\(\) .*zero_\(\)"
    ):
        backward(run, MICROBATCHES[1])
    assert_same_bits(weights_of(net), before)
    optimizer.zero_grad()
    backward(run, MICROBATCHES[1])
    optimizer.step()
    train_with_a_list(twin, [expected], steps=[MICROBATCHES[:1], MICROBATCHES[1:2]])
    assert_same_bits(weights_of(net), weights_of(twin))


def test_a_grad_that_was_taken_away_between_microbatches_is_noticed() -> None:
    """Where the dtypes agree; elsewhere there is none."""
    net, twin = built(), built()
    gradients = f8.FlatGradients(net.parameters())
    backward(net, MICROBATCHES[0])
    net.zero_grad()
    with pytest.raises(RuntimeError, match=r"model.zero_grad\(\).* don't reach the buffer"):
        backward(net, MICROBATCHES[1])
    gradients.zero_()
    backward(net, MICROBATCHES[1])
    assert torch.equal(gradients.flat, accumulated_in_a_list(twin, twin, MICROBATCHES[1:2]))


CHANGES = list(itertools.permutations([FLOAT32, BFLOAT16, torch.float16], 2))


@pytest.mark.parametrize(("dtype", "other"), CHANGES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_another_dtype_of_the_model_is_followed_where_no_gradients_are_held(
    dtype: torch.dtype, other: torch.dtype
) -> None:
    net, twin = built().to(dtype), built().to(dtype)
    optimizer, expected = SGD(net.parameters(), lr=1e-2), SGD(twin.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    for model in (net, twin):
        model.to(other)
    for words in STEPS[0]:
        backward(net, words)
    optimizer.step()
    train_with_a_list(twin, [expected], steps=STEPS[:1])
    assert_same_bits(weights_of(net), weights_of(twin))


@pytest.mark.parametrize(("dtype", "other"), CHANGES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_another_dtype_while_gradients_are_held_is_followed_or_noticed(dtype: torch.dtype, other: torch.dtype) -> None:
    """`.to` makes `.grad` another tensor than the slice, and with it a sum of two."""
    net, twin = built().to(dtype), built().to(dtype)
    gradients, sums = f8.FlatGradients(net.parameters()), ListOfGradients(twin.parameters())
    for words in MICROBATCHES[:2]:
        if words is MICROBATCHES[1]:
            for model in (net, twin):
                model.to(other)
            if FLOAT32 in (dtype, other):
                with pytest.raises(RuntimeError, match=r"`.to\(dtype\)`"):
                    backward(net, words)
                gradients.zero_()
                sums.zero()
        backward(net, words)
        backward(twin, words)
        sums.add()
    assert torch.equal(gradients.flat, sums.cat())


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_is_refused_where_gradients_would_have_to_be_cast(positional: bool) -> None:
    net, twin = built(dtype="bfloat16"), built(dtype="bfloat16")
    optimizer, expected = SGD(net.parameters(), lr=1e-2), SGD(twin.parameters(), lr=1e-2)
    gradients = f8.FlatGradients(net.parameters())
    gradients.attach(optimizer)
    backward(net, MICROBATCHES[0])
    weights, held = weights_of(net), gradients.flat.clone()
    arguments: Any = ((lambda: 0.0),) if positional else ()
    keywords: Any = {} if positional else {"closure": lambda: 0.0}
    with pytest.raises(TypeError, match=r"SGD.step\(closure\).*use FlatGradients\(..., dtype=torch.bfloat16\)"):
        optimizer.step(*arguments, **keywords)
    assert_same_bits(weights_of(net), weights)
    assert torch.equal(gradients.flat, held)
    assert all(p.grad is None for p in net.parameters())
    optimizer.step()
    train_with_a_list(twin, [expected], steps=[MICROBATCHES[:1]])
    assert_same_bits(weights_of(net), weights_of(twin))
