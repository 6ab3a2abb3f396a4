"""Delayed scales move once per optimizer step, by themselves: with any optimizer, for the layers that it trains, in a
constant number of ops."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from delayed_checks import (
    K,
    assert_same_bits,
    backward,
    batches,
    evidence,
    layers_of,
    mlp,
    plain_mlp,
    settled_state_of,
    state_of,
    train,
    weights_of,
)
from oracles import E4M3, scale
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8
from float8_compile.delayed_step import UNSEEN_BACKWARDS, scales_of

# Dynamo asks an input that is no leaf for its gradient.
pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
eagerly_and_traced = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])


def scale_of_weight(layer: nn.Linear) -> float:
    return scale(layer.weight.abs().max().item(), E4M3)


# Any optimizer


def compiled_step(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = SGD(parameters, lr=1e-3, momentum=0.9)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
    return optimizer


class SignDescent(Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad.sign()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=1e-3),
    "AdamW": lambda p: AdamW(p, lr=1e-3),
    "AdamW, fused": lambda p: AdamW(p, lr=1e-3, fused=True),
    "AdamW, foreach": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "AdamW, a group for each parameter": lambda p: AdamW([{"params": [one]} for one in p], lr=1e-3),
    "a compiled step": compiled_step,
    "the user's own": SignDescent,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=3),
}


@pytest.mark.parametrize("made", ["before conversion", "after conversion"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_any_optimizer_moves_every_scale_once(name: str, made: str) -> None:
    plain = plain_mlp(K, 48, K)
    optimizer = OPTIMIZERS[name](list(plain.parameters())) if made == "before conversion" else None
    model = f8.convert_to_float8_training(plain, config="delayed")
    optimizer = optimizer or OPTIMIZERS[name](list(model.parameters()))
    largest = 0.0
    for x in batches(3, 8, K):
        before, weights = state_of(model), weights_of(model)
        largest = max(largest, x.abs().max().item())

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            return backward(model, x)

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        for fqn, layer in model.named_children():
            if isinstance(layer, f8.Float8Linear):
                assert not torch.equal(layer.weight, weights[f"{fqn}.weight"])
                assert layer.weight_scale is not None
                assert layer.weight_scale.scale.item() == scale_of_weight(layer)
                for role in ("input", "grad_output"):
                    entry = scales_of(layer)[role]
                    assert entry.amax_history is not None
                    assert torch.equal(entry.amax_history[1:], before[f"{fqn}.{role}.amax_history"][:-1])
                    assert entry.amax_history[0] > 0
                    assert entry.amax == 0
        assert layers_of(model)[0].input_scale.scale.item() == scale(largest, E4M3)


@eagerly_and_traced
def test_an_optimizer_for_each_parameter_may_step_inside_backward(compiled: bool) -> None:
    """As soon as its gradient is there, which spares the gradients' memory: a layer then moves when its backward pass
    is over, and as if one optimizer had stepped at the end."""
    runs = []
    for inside in (False, True):
        model = mlp(K, 48, K)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        if inside:
            optimizers = {parameter: SGD([parameter], lr=1e-2) for parameter in model.parameters()}

            def step(parameter: Tensor, optimizers: dict[Tensor, Optimizer] = optimizers) -> None:
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()

            for parameter in optimizers:
                parameter.register_post_accumulate_grad_hook(step)
            for x in batches(3, 8, K):
                backward(run, x)
        else:
            train(model, run, batches(3, 8, K), SGD(model.parameters(), lr=1e-2))
        runs.append({**state_of(model), **weights_of(model)})
    assert_same_bits(*runs)


def test_a_compiled_step_has_no_graph_that_the_hook_would_break() -> None:
    """fullgraph=True fails on a plain model as well: torch's own `step` breaks its graph."""
    plain = nn.Linear(4, 4)
    plain(torch.randn(2, 4)).sum().backward()
    optimizer = AdamW(plain.parameters())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()


def test_a_skipped_step_moves_nothing_and_the_next_one_is_as_if_it_had_not_been() -> None:
    """Scenarios 5 and 14: torch's GradScaler, and an overflow in the second of three steps. What was not finite doesn't
    hide the amaxes of the step after it."""
    runs = []
    for overflows in (False, True):
        model = mlp(K, 48, K)
        optimizer, scaler = SGD(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number, x in enumerate(batches(3, 8, K)):
            if number == 1:
                if not overflows:
                    continue
                x = x.clone()
                x[0, 0] = math.nan
            optimizer.zero_grad()
            before = settled_state_of(model)
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0**10)
            if number == 1:
                assert_same_bits(settled_state_of(model), before)
        runs.append({**state_of(model), **weights_of(model)})
        assert all(tensor.isfinite().all() for tensor in runs[-1].values())
    assert_same_bits(*runs)


def test_steps_that_a_grad_scaler_skips_at_the_start_cost_no_second_recompilation() -> None:
    """Its first scales are meant to overflow. The first step that it takes is evidence for all of the model."""
    model = mlp(K, 48, K)
    run, counter = compile_counted(model)
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**18)
    taken = 0
    for x in batches(8, 8, K):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = run(x).float().square().sum()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken += scaler.get_scale() == before
        assert all(evidence(model).values()) == (taken > 0)
    assert 0 < taken < 8
    assert counter.frame_count == 2


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW])
def test_a_step_that_a_fused_optimizer_skips_by_itself_moves_nothing(optimizer_class: Any) -> None:
    """A GradScaler calls the step of a fused optimizer always, and tells it whether to do anything."""
    model = mlp(K, 48, K)
    optimizer = optimizer_class(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, x in enumerate(batches(3, 8, K)):
        before, weights = state_of(model), weights_of(model)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        amaxes = state_of(model)
        if number == 1:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if number == 1:
            assert_same_bits(weights_of(model), weights)
            assert_same_bits(state_of(model), amaxes)
            assert_same_bits(settled_state_of(model), {n: t for n, t in before.items() if not n.endswith(".amax")})
        else:
            assert not torch.equal(model[0].input_scale.amax_history, before["0.input.amax_history"])


def test_a_bad_step_that_is_taken_leaves_the_histories_as_they_were() -> None:
    """One layer's gradient is not finite: its entry stays, the others move."""
    model = mlp(K, 48, K)
    optimizer = SGD(model.parameters(), lr=0.0)
    train(model, model, batches(2, 8, K), optimizer)
    before = settled_state_of(model)
    backward(model, batches(3, 8, K)[-1])
    model[0].grad_output_scale.amax.fill_(math.nan)
    model[2].input_scale.amax.fill_(math.inf)
    optimizer.step()
    after = state_of(model)
    for name, kept in before.items():
        if name.startswith(("0.grad_output", "2.input")):
            assert torch.equal(after[name], kept), name
        elif name.endswith("amax_history"):
            assert torch.equal(after[name][1:], kept[:-1]), name
            assert after[name][0] > 0
    assert not any(after[name].any() for name in after if name.endswith(".amax")), "the next step begins anew"


# Which layers it moves


def moved(model: nn.Module, step: Callable[[], Any]) -> set[str]:
    """The layers whose scales a step moves, after a pass through all of them."""
    backward(model, torch.randn(8, K))
    before = {fqn: settled_state_of(m) for fqn, m in model.named_modules() if isinstance(m, f8.Float8Linear)}
    step()
    after = {fqn: settled_state_of(m) for fqn, m in model.named_modules() if isinstance(m, f8.Float8Linear)}
    return {fqn for fqn in before if any(not torch.equal(before[fqn][n], t) for n, t in after[fqn].items())}


def test_only_the_layers_of_the_optimizer_move() -> None:
    model = mlp(K, 48, 40, K)
    first = SGD(model[0].parameters(), lr=1e-2)
    rest = SGD([*model[2].parameters(), *model[4].parameters()], lr=1e-2)
    assert moved(model, first.step) == {"0"}
    assert moved(model, rest.step) == {"2", "4"}
    assert model[0].input_scale.amax > 0, "its pass still counts for its own step"
    assert moved(model, first.step) == {"0"}


def test_a_bias_is_enough() -> None:
    model = mlp(K, 48, K)
    assert moved(model, SGD([model[2].bias], lr=1e-2).step) == {"2"}


def test_an_unrelated_optimizer_moves_nothing_but_what_nobody_trains() -> None:
    """A frozen layer, such as LoRA's base, has no optimizer of its own."""
    model, other = mlp(K, 48, 40, K), nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    optimizer = SGD(other.parameters(), lr=1e-2)
    assert moved(model, optimizer.step) == set()
    model[2].requires_grad_(False)
    assert moved(model, optimizer.step) == {"2"}
    model.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    assert moved(model, optimizer.step) == {"2", "4"}


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(K, K).requires_grad_(False)
        self.down, self.up = nn.Linear(K, 16, bias=False), nn.Linear(16, K, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@eagerly_and_traced
def test_an_adapter_trains_beside_its_frozen_base(compiled: bool) -> None:
    """And its zero weight, and the gradient that is zero behind it, have scales as soon as they are no zeros. The base
    has no backward pass at all."""
    model = f8.convert_to_float8_training(LoRA(), config="delayed")
    run, counter = compile_counted(model) if compiled else (model, None)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = train(model, run, [batches(1, 16, K)[0]] * 12, optimizer)
    assert losses[-1] < losses[0] / 2
    assert model.base.input_scale.amax_history.count_nonzero() == 12
    assert [name for name, known in evidence(model).items() if not known] == ["base.grad_output"]
    if counter is not None:
        assert counter.frame_count <= 3


def test_tied_weights_move_with_their_one_parameter() -> None:
    """Scenario 23's shape: two layers, one parameter, scales of their own."""
    model = mlp(K, K, K)
    model[2].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=1e-2)
    train(model, model, batches(3, 8, K), optimizer)
    for layer in layers_of(model):
        assert layer.weight_scale is not None
        assert layer.weight_scale.scale.item() == scale_of_weight(layer)
        assert layer.input_scale is not None
        assert layer.input_scale.amax_history is not None
        assert layer.input_scale.amax_history.count_nonzero() == 3


def test_a_layer_in_two_models_moves_with_either() -> None:
    shared = mlp(K, K)
    models = [nn.Sequential(shared, mlp(K, K)), nn.Sequential(shared, mlp(K, K))]
    assert moved(models[0], SGD(models[0].parameters(), lr=1e-2).step) == {"0.0", "1.0"}
    assert moved(models[1], SGD(models[1].parameters(), lr=1e-2).step) == {"0.0", "1.0"}


# Two models that take turns


@eagerly_and_traced
@pytest.mark.parametrize("converted", ["together", "apart"])
def test_a_step_of_the_discriminator_between_the_generators_forward_and_backward(
    converted: str, compiled: bool
) -> None:
    """The generator's scales, though in the same vectors, stay as its forward used them."""
    models = nn.ModuleList([plain_mlp(K, K) for _ in range(2)])
    for part in [models] if converted == "together" else models:
        f8.convert_to_float8_training(part, config="delayed")
    generator = models[0]
    optimizers = [SGD(part.parameters(), lr=1e-2) for part in models]
    runs = [torch.compile(m, backend="aot_eager", fullgraph=True) if compiled else m for m in models]
    for number in range(3):
        fake = runs[0](torch.randn(8, K))
        runs[1](fake.detach()).square().mean().backward()
        before = settled_state_of(generator)
        optimizers[1].step()
        assert_same_bits(settled_state_of(generator), before)
        runs[1](fake).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        (layer,) = layers_of(generator)
        assert layer.input_scale is not None
        assert layer.input_scale.amax_history is not None
        assert layer.input_scale.amax_history.count_nonzero() == number + 1


@eagerly_and_traced
@pytest.mark.parametrize("moves", ["optimizer.step", "update_delayed_scaling"])
def test_a_step_between_forward_and_backward_of_its_own_model_raises(moves: str, compiled: bool) -> None:
    """Backward must use the scales that forward used."""
    model = mlp(K, 48, K)
    optimizer = SGD(model.parameters(), lr=0.0)
    train(model, model, batches(1, 8, K), optimizer)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    loss = run(torch.randn(8, K)).sum()
    if moves == "optimizer.step":
        optimizer.step()
    else:
        f8.update_delayed_scaling(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# By hand as well as by itself


@pytest.mark.parametrize("by_hand", [f8.update_delayed_scaling, f8.sync_float8_amax_and_scale_history])
@pytest.mark.parametrize("when", ["before the step", "after the step", "both"])
def test_an_update_by_hand_beside_the_steps_own_happens_once(when: str, by_hand: Callable[[nn.Module], None]) -> None:
    """float8_experimental's loop calls it after backward, before the step."""
    runs = []
    for calls in (False, True):
        model = mlp(K, 48, K)
        optimizer = SGD(model.parameters(), lr=1e-2)
        for x in batches(4, 8, K):
            backward(model, x)
            if calls and when != "after the step":
                by_hand(model)
            optimizer.step()
            if calls and when != "before the step":
                by_hand(model)
            optimizer.zero_grad()
        runs.append({**state_of(model), **weights_of(model)})
    assert_same_bits(*runs)


def test_an_update_by_hand_takes_the_weights_as_they_are() -> None:
    """After a change that no optimizer made; until then numbers beyond the old amax saturate."""
    model = mlp(K, 48, K)
    train(model, model, batches(1, 8, K))
    model[0].weight.data.mul_(4)
    f8.update_delayed_scaling(model)
    assert model[0].weight_scale.scale.item() == scale_of_weight(model[0])


# What it costs


class Ops(TorchDispatchMode):
    """How often each op ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way for the host to wait for a number of the device."""

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host reads a tensor")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, read)


def ops_of_a_step(monkeypatch: pytest.MonkeyPatch, layers: int, frozen: int = 0) -> Counter[str]:
    model = mlp(*[16] * (layers + 1))
    for layer in layers_of(model)[:frozen]:
        layer.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    for x in batches(2, 4, 16):
        train(model, model, [x], optimizer)
    backward(model, x)
    with monkeypatch.context() as patch, Ops() as ops:
        forbid_reading(patch)
        optimizer.step()
    return ops.calls


def test_an_update_is_the_same_few_ops_for_any_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 46, and no number is read by the host."""
    few, many = (ops_of_a_step(monkeypatch, layers) for layers in (20, 200))
    assert few == many
    assert few["aten._foreach_norm.Scalar"] == 1
    assert sum(few.values()) < 100
    assert not [name for name in few if "_local_scalar_dense" in name]


def test_so_it_is_where_only_some_layers_move(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (4, 40):
        model = mlp(*[16] * (layers + 1))
        optimizers = [SGD(part.parameters(), lr=1e-3, foreach=True) for part in (model[:4], model[4:])]
        for _ in range(3):
            backward(model, batches(1, 4, 16)[0])
            with Ops() as ops:
                for optimizer in optimizers:
                    optimizer.step()
        counts.append(ops.calls)
        backward(model, batches(1, 4, 16)[0])
        with monkeypatch.context() as patch:
            forbid_reading(patch)
            for optimizer in optimizers:
                optimizer.step()
    assert counts[0] == counts[1]


def test_passes_of_the_steady_state_read_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(K, 48, K)
    train(model, model, batches(2, 8, K))
    x = batches(1, 8, K)[0]
    with monkeypatch.context() as patch, Ops() as ops:
        forbid_reading(patch)
        model(x).square().sum().backward()
    assert not [name for name in ops.calls if "_local_scalar_dense" in name]


def test_reading_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="the host reads a tensor"):
        ops_of_the_first_step(monkeypatch)


def ops_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which it is asked for which layers there is evidence."""
    model = mlp(16, 16)
    backward(model, batches(1, 4, 16)[0])
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        SGD(model.parameters(), lr=1e-3).step()


# Evidence


class Gate(nn.Module):
    """Lets no gradient through for some steps."""

    def __init__(self, closed: int) -> None:
        super().__init__()
        self.closed = closed
        self.register_buffer("open", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.open + (x * (1 - self.open)).detach()

    def after_step(self, number: int) -> None:
        self.open.fill_(float(number >= self.closed))


@pytest.mark.parametrize(
    ("closed", "known_after", "compiled"), [(1, 2, False), (2, 4, False), (3, 4, True), (6, 8, False)]
)
def test_late_evidence_is_found_after_the_next_power_of_two(closed: int, known_after: int, compiled: bool) -> None:
    """The host looks after updates 1, 2, 4, 8, ...: so few recompilations. Until then the stored scale is used."""
    model = mlp(K, 48, K)
    model.insert(1, gate := Gate(closed))
    run, counter = compile_counted(model) if compiled else (model, None)
    optimizer = SGD(model.parameters(), lr=1e-2)
    known = []
    for number, x in enumerate(batches(10, 8, K), start=1):
        train(model, run, [x], optimizer)
        gate.after_step(number)
        known.append(evidence(model)["0.grad_output"])
        assert (model[0].grad_output_scale.scale > 0) == (number > closed)
        others = [value for name, value in evidence(model).items() if name != "0.grad_output"]
        assert all(others)
    assert known == [False] * (known_after - 1) + [True] * (10 - known_after + 1)
    if counter is not None:
        assert counter.frame_count == 3


def test_with_two_optimizers_no_layers_evidence_is_overlooked() -> None:
    """Each update of the shared vectors counts; the first optimizer's are the 1st, 3rd, 5th, ..."""
    model = mlp(K, 48, K)
    model.insert(1, gate := Gate(1))
    optimizers = [SGD(model[0].parameters(), lr=1e-2), SGD(model[3].parameters(), lr=1e-2)]
    for number, x in enumerate(batches(8, 8, K), start=1):
        backward(model, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        gate.after_step(number)
    assert all(evidence(model).values()), evidence(model)


# A model whose state never moves


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_20_backward_passes_without_a_step_warn_once_and_say_what_to_call(compiled: bool) -> None:
    model = mlp(K, 48, K)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(8, K)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(1, 2 * UNSEEN_BACKWARDS + 5):
            backward(run, x)
            if number == UNSEEN_BACKWARDS - 1:
                assert not seen
    (warning,) = seen
    assert "20 backward passes" in str(warning.message)
    assert "update_delayed_scaling(model)" in str(warning.message)


@pytest.mark.parametrize("moves", ["a step", "by hand", "a step of another optimizer"])
def test_no_warning_where_the_state_moves(moves: str) -> None:
    model, other = mlp(K, 48, K), nn.Linear(4, 4)
    parameters = other.parameters() if moves == "a step of another optimizer" else model.parameters()
    optimizer = SGD(parameters, lr=1e-3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(2 * UNSEEN_BACKWARDS):
            backward(model, torch.randn(4, K))
            if number == UNSEEN_BACKWARDS - 2:
                f8.update_delayed_scaling(model) if moves == "by hand" else optimizer.step()
    assert len(seen) == (moves == "a step of another optimizer")


def test_evaluation_and_dynamic_recipes_never_warn() -> None:
    """Warnings are errors here."""
    evaluated, dynamic = mlp(K, 48, K).eval(), mlp(K, 48, K, config="tensorwise")
    for _ in range(UNSEEN_BACKWARDS + 2):
        with torch.no_grad():
            evaluated(torch.randn(4, K))
        backward(dynamic, torch.randn(4, K))


# What is alive


@eagerly_and_traced
def test_a_model_that_trained_can_be_collected(compiled: bool) -> None:
    """By reference counts alone where it ran eagerly. A step of another model is then none of its business."""
    model, other = mlp(K, 48, K), mlp(K, 48, K)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    gc.collect()
    gc.disable()
    try:
        with f8.calibrate(model):
            backward(run, torch.randn(8, K))
        train(model, run, batches(3, 8, K), SGD(model.parameters(), lr=1e-2))
        layer = layers_of(model)[0]
        alive = [weakref.ref(thing) for thing in (model, layer, scales_of(layer)["input"].scales, layer.weight)]
        del model, run, layer
        if compiled:
            torch._dynamo.reset()
            gc.collect()
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()
    train(other, other, batches(2, 8, K))
    assert layers_of(other)[0].input_scale.amax_history.count_nonzero() == 2


def test_a_model_that_was_converted_back_is_left_alone() -> None:
    model = mlp(K, 48, K)
    optimizer = SGD(model.parameters(), lr=1e-2)
    train(model, model, batches(2, 8, K), optimizer)
    scales = weakref.ref(model[0].input_scale.scales)
    f8.convert_from_float8_training(model)
    assert scales() is None
    for _ in range(UNSEEN_BACKWARDS + 2):
        train(model, model, batches(1, 8, K), optimizer)


def test_a_part_that_is_thrown_away_leaves_the_rest_moving() -> None:
    model = mlp(K, K, K, K)
    del model[2]
    gc.collect()
    train(model, model, batches(2, 8, K))
    assert [layer.input_scale.amax_history.count_nonzero().item() for layer in layers_of(model)] == [2, 2]
