"""`monitor`: what each layer casts is measured, the model computes what it did before, and off it costs nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import Graphs, compile_counted, graphs_of, op_counts
from delayed_checks import assert_same_bits, backward, batches, gradients_of, mlp, state_of, train, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import float8_compile as f8
from float8_compile.monitor import Monitor
from float8_compile.operand_statistics import OperandStatistics

pytestmark = pytest.mark.usefixtures("afresh")

K, WIDTHS = 32, (32, 48, 40)
RECIPES = f8.Recipe.names()
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

ONCE = ("input", "weight", "grad_output")
SECOND = ("input for grad_weight", "weight for grad_input", "grad_output for grad_weight")
CAST = {
    "tensorwise": ONCE,
    "delayed": ONCE,
    "rowwise": (*ONCE, *SECOND),
    "rowwise_with_gw_hp": (*ONCE, "weight for grad_input"),
}


def batch(rows: int = 8, requires_grad: bool = True) -> Tensor:
    return batches(1, rows, K)[0].requires_grad_(requires_grad)


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor | None = None) -> dict[str, Tensor]:
    """Loss and gradients, of which none is left."""
    x = (batch() if x is None else x).detach().requires_grad_()
    loss = backward(run, x)
    assert x.grad is not None
    found = {**gradients_of(model), "loss": loss, "the input": x.grad}
    model.zero_grad()
    return found


def operands(seen: Monitor, layer: str = "0") -> tuple[str, ...]:
    return tuple(row.operand for row in seen.rows if row.layer == layer)


def assert_alike(rows: tuple[OperandStatistics, ...], expected: tuple[OperandStatistics, ...]) -> None:
    """The same but for the order of sums in float64."""

    def numbers(row: OperandStatistics) -> list[Any]:
        rowwise = [x for quality in row.rowwise.values() for x in quality]
        return [row.amax, *row.scale, row.saturated, row.flushed, row.nonfinite, row.sqnr, *rowwise]

    def names(row: OperandStatistics) -> tuple[Any, ...]:
        return row.layer, row.operand, row.cast, row.calls, row.numbers, tuple(row.rowwise)

    assert list(map(names, rows)) == list(map(names, expected))
    for found, wanted in zip(rows, expected, strict=True):
        assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-9), found


# What is measured


@every_recipe
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
def test_each_cast_of_a_step_is_measured_once(recipe: str, keep: bool) -> None:
    model = mlp(*WIDTHS, config=recipe, recompute=not keep)
    with f8.monitor(model) as seen:
        step(model, model)
    assert [(row.layer, row.operand) for row in seen.rows] == [(n, o) for n in "02" for o in CAST[recipe]]
    shapes = {"input": 8 * K, "weight": 48 * K, "grad_output": 8 * 48}
    for row in seen.rows:
        assert row.calls == 1
        assert row.layer == "2" or row.numbers == shapes[row.operand.split(" ")[0]]
        assert row.sqnr is not None
        assert 24 < row.sqnr < 40
        assert (row.saturated, row.nonfinite) == (0, 0)
    assert seen.rows[0].amax == batch().abs().max()
    assert seen.rows[1].amax == model[0].weight.abs().max()


@every_recipe
def test_a_compiled_step_has_the_same_rows(recipe: str) -> None:
    model, compiled = mlp(K, 48, config=recipe), mlp(K, 48, config=recipe)
    with f8.monitor(model) as expected, f8.monitor(compiled) as seen:
        step(model, model)
        step(compile_counted(compiled)[0], compiled)
    assert_alike(seen.rows, expected.rows)


@every_recipe
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
def test_a_cached_weight_is_measured_as_if_it_were_cast(recipe: str, keep: bool) -> None:
    model, cached = (mlp(*WIDTHS, config=recipe, recompute=not keep) for _ in range(2))
    f8.cache_weight_casts(cached)
    with f8.monitor(model) as expected, f8.monitor(cached) as seen:
        step(model, model)
        step(cached, cached)
    assert_alike(seen.rows, expected.rows)


def test_in_eval_and_without_gradients_forward_is_measured() -> None:
    model = mlp(*WIDTHS, config="rowwise").eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), f8.monitor(model) as seen:
            model(batch())
        assert operands(seen) == ("input", "weight")
    with f8.monitor(model) as seen:
        step(model, model)
    assert operands(seen) == CAST["rowwise"]


def test_what_runs_in_high_precision_is_not_measured() -> None:
    model = mlp(*WIDTHS)
    with f8.monitor(model) as seen:
        with f8.float8_disabled(model):
            step(model, model)
        assert seen.rows == ()
        assert "nothing was cast in 2 of 2 layers: 0, 2" in str(seen)
        model[0].enabled = False
        step(model, model)
    assert operands(seen) == ()
    assert operands(seen, "2") == ONCE


def test_a_gradient_that_nobody_wants_is_not_measured() -> None:
    model = mlp(*WIDTHS, config="rowwise")
    model[0].weight.requires_grad_(False)
    with f8.monitor(model) as seen:
        step(model, model)
    assert operands(seen) == (*ONCE, "weight for grad_input")
    with f8.monitor(model) as seen:
        model(batch(requires_grad=False)).sum().backward()
    assert operands(seen) == ("input", "weight"), "frozen, and the input wants none"


def test_calls_and_steps_add_up() -> None:
    layer = f8.Float8Linear(K, K)
    with f8.monitor(layer) as seen:
        layer(layer(batch())).sum().backward()
        layer(batch(rows=2))
        assert [(row.layer, row.operand, row.calls, row.numbers) for row in seen.rows] == [
            ("", "input", 3, 18 * K),
            ("", "weight", 3, 3 * K * K),
            ("", "grad_output", 2, 16 * K),
        ]
        within = seen.rows
    assert seen.rows == within, "and what was read inside is what is read afterwards"
    layer(batch())
    assert seen.rows == within


def test_numbers_beyond_a_delayed_scale_are_seen_and_its_first_scale_is_dynamic() -> None:
    model = mlp(*WIDTHS)
    with f8.monitor(model) as first:
        train(model, model, [batch().detach()])
    with f8.monitor(model) as later:
        backward(model, batch().detach() * 4)
    saturated = {row.operand: row.saturated for row in later.rows if row.layer == "0"}
    assert all(row.saturated == 0 for row in first.rows)
    assert saturated["input"] > 0.01
    assert saturated["weight"] == 0
    scale = model[0].input_scale.scale.item()
    assert later.rows[0].scale == (scale, scale)
    expected = (batch().abs().mul(4 * scale) > 448).double().mean().item()
    assert saturated["input"] == pytest.approx(expected)


def test_layers_that_share_a_scale_are_measured_apart() -> None:
    model = mlp(K, K, K)
    model[2].input_scale = model[0].input_scale
    with f8.monitor(model) as seen:
        step(model, model)
    assert (operands(seen, "0"), operands(seen, "2")) == (ONCE, ONCE)


def test_under_autocast_it_measures_what_autocast_makes() -> None:
    model = mlp(*WIDTHS, config="tensorwise")
    x = batch()
    with f8.monitor(model) as seen, torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert operands(seen) == ONCE
    assert seen.rows[0].amax == x.detach().bfloat16().abs().max()


def test_empty_batches_add_nothing_and_harm_nothing() -> None:
    model = mlp(*WIDTHS, config="rowwise")
    with f8.monitor(model) as seen:
        step(model, model, torch.empty(0, K))
    assert operands(seen) == ("weight", "weight for grad_input")
    assert "nan" not in str(seen)


# The model computes what it did


def train_watched(run: Callable[[Tensor], Tensor], model: Any, on: tuple[bool, ...]) -> dict[str, Tensor]:
    """A step of training for each of `on`, monitored or not: what each computes, and what is left."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    for number, (x, monitored) in enumerate(zip(batches(len(on), 8, K), on, strict=True)):
        with f8.monitor(model) if monitored else contextlib.nullcontext():
            seen[f"{number}.loss"] = backward(run, x)
        seen.update({f"{number}.{name}": gradient for name, gradient in gradients_of(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **state_of(model), **weights_of(model)}


def keeps_the_first(linear: nn.Module, fqn: str) -> bool:
    return fqn != "0"


@every_recipe
@pytest.mark.parametrize("calibrated", [False, True], ids=["", "calibrated"])
def test_outputs_gradients_weights_and_scales_are_bitwise_those_without(recipe: str, calibrated: bool) -> None:
    plain, model = (mlp(*WIDTHS, config=recipe, recompute=keeps_the_first) for _ in range(2))
    if calibrated and recipe == "delayed":
        for each in (plain, model):
            f8.mark_calibrated(each)
    on, off = (False, True, True, False), (False, False, False, False)
    assert_same_bits(train_watched(model, model, on), train_watched(plain, plain, off))


@every_recipe
def test_compiled_they_are_too_on_one_compilation_more(recipe: str) -> None:
    """Entering compiles once, the first time; leaving finds the old graph, and entering again the other one."""
    plain, model = (mlp(*WIDTHS, config=recipe, recompute=keeps_the_first) for _ in range(2))
    if recipe == "delayed":
        for each in (plain, model):
            f8.mark_calibrated(each)
    compiled, counter = compile_counted(model)
    counts: list[int] = []

    def run(x: Tensor) -> Tensor:
        y = compiled(x)
        counts.append(counter.frame_count)
        return y

    on, off = (False, True, False, True, False), (False,) * 5
    assert_same_bits(train_watched(run, model, on), train_watched(plain, plain, off))
    assert counts == [1, 2, 2, 2, 2]


def test_by_inductor_they_are_close_and_the_rows_too() -> None:
    """It keeps more precision where it fuses: a rounding to bfloat16, now and then a float8 number's neighbour."""
    plain, model = (mlp(K, 48, config="tensorwise").bfloat16() for _ in range(2))
    x = batch().detach().bfloat16()
    with f8.monitor(plain) as expected, f8.monitor(model) as seen:
        eager, compiled = step(plain, plain, x), step(torch.compile(model, fullgraph=True), model, x)
    for name, tensor in compiled.items():
        assert (tensor.float() - eager[name].float()).norm() <= 0.01 * eager[name].float().norm(), name
    for found, wanted in zip(seen.rows, expected.rows, strict=True):
        assert (found.operand, found.numbers, found.saturated) == (wanted.operand, wanted.numbers, wanted.saturated)
        assert found.sqnr == pytest.approx(wanted.sqnr, abs=0.5)


POLICIES = {"all": CheckpointPolicy.MUST_SAVE, "none": CheckpointPolicy.PREFER_RECOMPUTE}


class Checkpointed(nn.Module):
    """A block that is run again in backward; what it computes after the layer reduces, as the statistics do."""

    def __init__(self, layer: nn.Module, policy: str | None) -> None:
        super().__init__()
        self.layer, self.policy = layer, policy

    def _block(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * y.double().sum(dtype=torch.float64).cos().float() + y.square().sum()

    def forward(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self.policy is not None:
            decide = functools.partial(_policy, POLICIES[self.policy])
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, decide)
        return checkpoint(self._block, x, use_reentrant=False, **options)


def _policy(answer: CheckpointPolicy, *_: Any, **__: Any) -> CheckpointPolicy:
    return answer


@pytest.mark.parametrize("policy", [None, "all", "none"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_in_checkpoints_too(policy: str | None, compiled: bool, recipe: str) -> None:
    plain, model = (Checkpointed(mlp(K, 48, config=recipe), policy) for _ in range(2))
    run = compile_counted(model)[0] if compiled else model
    expected = step(plain, plain)
    with f8.monitor(model) as seen:
        assert_same_bits(step(run, model), expected)
    assert operands(seen, "layer.0") == CAST[recipe]
    assert {row.saturated for row in seen.rows} == {0}


@pytest.mark.parametrize("policy", [None, "all", "none"])
def test_a_block_may_end_between_forward_and_backward(policy: str | None) -> None:
    plain, model = (Checkpointed(mlp(K, 48, config="rowwise"), policy) for _ in range(2))
    with f8.monitor(model) as seen:
        y = model(batch())
    y.square().sum().backward()
    plain(batch()).square().sum().backward()
    assert_same_bits(gradients_of(model), gradients_of(plain))
    assert operands(seen, "layer.0")[:2] == ("input", "weight")


def test_under_transforms_nothing_is_measured_and_nothing_breaks() -> None:
    model, x = mlp(*WIDTHS, config="tensorwise"), batch().detach()
    gradient = torch.func.grad(lambda t: model(t).square().sum())
    expected = gradient(x)
    with f8.monitor(model) as seen:
        assert torch.equal(gradient(x), expected)
    assert seen.rows == ()


# Off it costs nothing


def test_numbers_of_tokens_compile_as_often_as_without() -> None:
    model = mlp(K, 48, config="tensorwise")
    run, counter = compile_counted(model, dynamic=True)
    with f8.monitor(model) as seen:
        for rows in (8, 24, 7, 1, 0, 12):
            step(run, model, torch.randn(rows, K))
    assert counter.frame_count == 3
    assert seen.rows[0].numbers == (8 + 24 + 7 + 1 + 12) * K


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_off_the_graph_is_as_if_it_had_never_been_on(recipe: str) -> None:
    def graphs(before: bool, on: bool) -> Graphs:
        model = mlp(K, 48, config=recipe)
        if before:
            with f8.monitor(model):
                step(model, model)
        with f8.monitor(model) if on else contextlib.nullcontext():
            return graphs_of(lambda run: step(run, model), model)

    never, after, on = graphs(False, False), graphs(True, False), graphs(False, True)
    ops, saved = op_counts([*never.forward, *never.backward]), shapes_of(never.saved())
    assert op_counts([*after.forward, *after.backward]) == ops
    assert shapes_of(after.saved()) == saved
    assert ops["aten.sum.dim_IntList"] == 1, "the bias's gradient; all else that is summed is the monitor's"
    assert all(more > less for more, less in zip(on.node_counts(), never.node_counts(), strict=True))


def shapes_of(tensors: list[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((str(t.dtype), tuple(t.shape)) for t in tensors)


# Left as it was


def statistics_of(model: nn.Module) -> list[Any]:
    return [layer.statistics for layer in model.modules() if isinstance(layer, f8.Float8Linear)]


def test_an_exception_ends_it_and_what_was_recorded_is_kept() -> None:
    model = mlp(*WIDTHS)
    with pytest.raises(ValueError, match="last dimension is 3"), f8.monitor(model) as seen:  # noqa: PT012
        model(batch())
        model(torch.ones(2, 3))
    assert statistics_of(model) == [None, None]
    assert operands(seen) == ("input", "weight")


def test_a_layer_is_monitored_once_at_a_time() -> None:
    model = mlp(*WIDTHS)
    with f8.monitor(model[2]) as outer:
        with pytest.raises(RuntimeError, match="layer '2' is monitored already"), f8.monitor(model):
            pass
        assert model[0].statistics is None, "and none was touched"
        step(model, model)
    assert operands(outer, "") == ONCE
    with f8.monitor(model) as seen:
        step(model, model)
    assert operands(seen, "2") == ONCE


def _by_deepcopy(model: Any) -> Any:
    return copy.deepcopy(model)


def _by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _by_file(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [_by_deepcopy, _by_pickle, _by_file])
def test_a_copy_is_not_monitored_and_no_file_has_it(copied: Callable[[Any], Any]) -> None:
    model = mlp(*WIDTHS)
    keys = list(model.state_dict())
    with f8.monitor(model) as seen:
        other = copied(model)
        assert list(model.state_dict()) == keys
        assert statistics_of(other) == [None, None]
        assert_same_bits(step(other, other), step(model, model))
        assert all(row.calls == 1 for row in seen.rows)
    assert_same_bits(state_of(other), state_of(model))


def test_layers_may_change_inside() -> None:
    model = mlp(*WIDTHS, config="tensorwise")
    with f8.monitor(model) as seen:
        step(model, model)
        f8.convert_from_float8_training(model)
        step(model, model)
    assert type(model[0]) is nn.Linear
    assert "statistics" not in vars(model[0])
    assert operands(seen) == ONCE
    f8.convert_to_float8_training(model)
    assert statistics_of(model) == [None, None]


def test_converting_again_inside_keeps_it_on() -> None:
    model = mlp(*WIDTHS, config="tensorwise")
    with f8.monitor(model) as seen:
        f8.convert_to_float8_training(model)
        step(model, model)
    assert operands(seen) == ONCE


def test_names_are_the_users() -> None:
    wrapped = nn.Sequential(torch.compile(mlp(*WIDTHS), backend="eager"))
    with f8.monitor(wrapped) as seen:
        wrapped(batch())
    assert {row.layer for row in seen.rows} == {"0.0", "0.2"}


def test_a_model_without_float8_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"Linear has no Float8Linear: call convert_to_float8_training"):  # noqa: SIM117
        with f8.monitor(nn.Linear(4, 4)):
            pass
