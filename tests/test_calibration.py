"""Delayed state by hand: calibrate, mark_calibrated, reset; and layers that turn out to read the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import Graphs, compile_counted, graphs_of
from delayed_checks import (
    K,
    assert_same_bits,
    backward,
    batches,
    evidence,
    gradients_of,
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
from torch.utils.checkpoint import checkpoint

import float8_compile as f8
from float8_compile.delayed_step import scales_of

pytestmark = pytest.mark.usefixtures("afresh")


# calibrate


def test_what_runs_inside_is_evidence_and_at_the_end_the_scales_move_on() -> None:
    model, data = mlp(K, 48, K), batches(3, 8, K)
    with f8.calibrate(model) as inside:
        assert inside is model
        for x in data:
            backward(model, x)
        assert not any(evidence(model).values())
        assert not any(t.any() for name, t in settled_state_of(model).items() if "weight" not in name)
    assert all(evidence(model).values())
    largest = max(x.abs().max().item() for x in data)
    assert model[0].input_scale.scale.item() == scale(largest, E4M3)
    assert model[0].input_scale.amax_history.tolist() == [largest, *[0.0] * 15]
    assert model[2].weight_scale.scale.item() == scale(model[2].weight.abs().max().item(), E4M3)
    assert not any(t.any() for name, t in state_of(model).items() if name.endswith(".amax"))


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
def test_it_works_in_any_mode_and_gradients_need_a_backward_pass(mode: str) -> None:
    model, x = mlp(K, 48, K), batches(1, 8, K)[0]
    model.train(mode != "eval")
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with f8.calibrate(model), context():
        model(x)
    assert evidence(model) == {
        f"{fqn}.{role}": role != "grad_output" for fqn in ("0", "2") for role in ("input", "grad_output", "weight")
    }
    assert model[0].input_scale.scale.item() == scale(x.abs().max().item(), E4M3)
    if mode == "eval":
        with f8.calibrate(model):
            backward(model, x)
        assert all(evidence(model).values())
    before = state_of(model)
    with torch.no_grad():
        model(100 * x)
    assert_same_bits(state_of(model), before)
    assert model.training == (mode != "eval")


def test_without_backward_gradients_begin_with_dynamic_scales() -> None:
    """A loss whose gradients a scale of 1 would lose."""
    model, x = mlp(K, 48, 48, K, between=nn.ReLU), batches(1, 8, K)[0]
    with f8.calibrate(model), torch.no_grad():
        model(x)
    (model(x).sum() * 1e-7).backward()
    assert all(gradient.any() for gradient in gradients_of(model).values())


def test_a_compiled_model_runs_eagerly_inside_and_compiles_once_after() -> None:
    model = mlp(K, 48, K)
    run, counter = compile_counted(model)
    with f8.calibrate(model):
        for x in batches(2, 8, K):
            backward(run, x)
        assert counter.frame_count == 0
    train(model, run, batches(6, 8, K))
    assert counter.frame_count == 1


def test_a_model_that_was_compiled_before_compiles_once_more() -> None:
    """Its graphs had dynamic scales. And calibrating again costs nothing."""
    model = mlp(K, 48, K)
    run, counter = compile_counted(model)
    backward(run, batches(1, 8, K)[0])
    for _ in range(3):
        with f8.calibrate(model):
            backward(run, batches(1, 8, K)[0])
        train(model, run, batches(2, 8, K))
        assert counter.frame_count == 2


def test_a_model_under_another_name_of_its_own_is_calibrated_as_well() -> None:
    """What torch.compile returns is a module around the model."""
    run = torch.compile(mlp(K, 48, K), backend="aot_eager", fullgraph=True)
    with f8.calibrate(run):
        backward(run, batches(1, 8, K)[0])
    assert all(evidence(run).values())


def test_a_part_of_a_model_can_be_calibrated() -> None:
    model = mlp(K, 48, 40, K)
    with f8.calibrate(model[2:]):
        backward(model, batches(1, 8, K)[0])
    assert {name.split(".")[0] for name, known in evidence(model).items() if known} == {"2", "4"}


@pytest.mark.parametrize("already", [False, True], ids=["fresh", "trained"])
def test_a_block_that_raises_leaves_state_and_layers_as_they_were(already: bool) -> None:
    model, x = mlp(K, 48, K), batches(1, 8, K)[0]
    if already:
        train(model, model, batches(2, 8, K))
    before, known, scales = settled_state_of(model), evidence(model), [scales_of(layer) for layer in layers_of(model)]

    def raising() -> None:
        with f8.calibrate(model):
            backward(model, x)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's"):
        raising()
    assert_same_bits(settled_state_of(model), before)
    assert evidence(model) == known
    assert [scales_of(layer) for layer in layers_of(model)] == scales
    assert not any(layer._forward_pre_hooks or layer.calibrating for layer in layers_of(model))
    run, counter = compile_counted(model)  # and nothing is forced to run eagerly
    run(x)
    assert counter.frame_count == 1


def test_calibrating_inside_calibrating_ends_with_the_outer_one() -> None:
    model, x = mlp(K, 48, K), batches(1, 8, K)[0]
    model.eval()
    with f8.calibrate(model):
        with f8.calibrate(model):
            model(x)
        model(2 * x)
    assert model[0].input_scale.scale.item() == scale(2 * x.abs().max().item(), E4M3)
    assert not model[0].calibrating


def test_calibrated_or_not_the_first_step_of_the_same_batch_is_the_same() -> None:
    """The amaxes of a batch give the scales that it would have dynamically."""
    x, results = batches(1, 8, K)[0], []
    for calibrates in (False, True):
        model = mlp(K, 48, K)
        if calibrates:
            with f8.calibrate(model):
                backward(model, x)
            model.zero_grad()
        loss = backward(model, x)
        results.append({"loss": loss, **gradients_of(model)})
    assert_same_bits(*results)


# Layers that read the same tensor


class Block(nn.Module):
    """Attention's and a gated MLP's projections, with what lies between them left out. `variant`: who reads what."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant = variant
        self.q, self.k, self.v, self.gate, self.up = (nn.Linear(K, K, bias=False) for _ in range(5))
        self.down = nn.Linear(K, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.relu()
        other = h + 0 if self.variant == "v reads a copy" else h
        y = self.q(h) * self.k(h) + self.v(other)
        z = y.relu()
        return self.down(self.gate(z) * self.up(z))


def sharing(model: nn.Module) -> set[tuple[str, ...]]:
    """The groups of layers that have one input scale."""
    groups: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, f8.Float8Linear):
            groups.setdefault(id(module.input_scale), []).append(fqn)
    return {tuple(group) for group in groups.values() if len(group) > 1}


def block(variant: str = "", config: Any = "delayed") -> Block:
    model = f8.convert_to_float8_training(Block(variant), config=config)
    assert isinstance(model, Block)
    return model


def casts_of_inputs(graphs: Graphs) -> int:
    """How many float8 tensors of the inputs' shape the forward graphs make."""
    return sum(
        "convert_element_type" in str(n.target) and n.args[1] is E4M3 and tuple(n.meta["val"].shape) == (16, K)
        for graph in graphs.forward
        for n in graph.graph.nodes
    )


@pytest.mark.parametrize("calls", [1, 3])
def test_layers_that_always_read_the_same_tensor_share_its_scale_and_cast_it_once(calls: int) -> None:
    model, data = block(), batches(calls, 16, K)
    with f8.calibrate(model):
        for x in data:
            backward(model, x)
    assert sharing(model) == {("q", "k", "v"), ("gate", "up")}
    graphs = graphs_of(lambda run: backward(run, 2 * data[-1]), model)
    amaxes = [n for n in graphs.forward[0].graph.nodes if "amax" in str(n.target)]
    assert (casts_of_inputs(graphs), len(amaxes)) == (3, 2 * 3), "h, z and what down reads; two stages each"
    assert model.v.input_scale.amax == 2 * data[-1].max()


def test_not_shared_they_cast_it_once_each() -> None:
    """So the test above can fail."""
    model = block()
    f8.mark_calibrated(model)
    assert sharing(model) == set()
    graphs = graphs_of(lambda run: backward(run, batches(1, 16, K)[0]), model)
    assert casts_of_inputs(graphs) == 3 + 2 + 1


def test_sharing_changes_no_number() -> None:
    """Eagerly, in training and in checkpoints: each of those that share had the same scale anyway."""
    results = []
    for shares in (True, False):
        model = block()
        with f8.calibrate(model):
            backward(model, batches(1, 16, K)[0])
        model.zero_grad()
        if not shares:
            state = {name: t.clone() for name, t in model.state_dict().items()}
            model = block()
            model.load_state_dict(state)
            assert sharing(model) == set()
        losses = train(model, model, batches(4, 16, K))
        results.append({"losses": torch.stack(losses), **state_of(model), **weights_of(model)})
        results[-1] |= {f"saved {name}": t for name, t in model.state_dict().items()}
    assert_same_bits(*results)


def test_an_optimizer_of_one_of_them_moves_the_scale_that_they_share() -> None:
    model = block()
    with f8.calibrate(model):
        backward(model, batches(1, 16, K)[0])
    optimizer = torch.optim.SGD(model.v.parameters(), lr=1e-2)
    train(model, model, [3 * batches(1, 16, K)[0]], optimizer)
    assert model.q.input_scale.scale.item() == scale(3 * batches(1, 16, K)[0].max().item(), E4M3)


def test_a_layer_that_reads_another_tensor_once_shares_nothing() -> None:
    model = block("v reads a copy")
    with f8.calibrate(model):
        backward(model, batches(1, 16, K)[0])
    assert sharing(model) == {("q", "k"), ("gate", "up")}

    model = block()
    with f8.calibrate(model):
        backward(model, batches(1, 16, K)[0])
        model.variant = "v reads a copy"
        backward(model, batches(1, 16, K)[0])
    assert sharing(model) == {("q", "k"), ("gate", "up")}


def test_a_layer_that_is_called_more_often_shares_nothing() -> None:
    model, x = block(), batches(1, 16, K)[0]
    with f8.calibrate(model):
        backward(model, x)
        model.v(x)
    assert sharing(model) == {("q", "k"), ("gate", "up")}


def test_layers_with_other_settings_share_nothing() -> None:
    """Another margin is another scale."""
    recipe = f8.Recipe.from_name("delayed")
    other = f8.Recipe(recipe.output, recipe.grad_input, recipe.grad_weight, delayed=f8.DelayedScaling(margin=1))
    model = block(config=lambda linear, fqn: other if fqn == "k" else "tensorwise" if fqn == "up" else recipe)
    with f8.calibrate(model):
        backward(model, batches(1, 16, K)[0])
    assert sharing(model) == {("q", "v")}
    assert model.k.input_scale.scale * 2 == model.q.input_scale.scale


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint_as_without(reentrant: bool) -> None:
    """Backward runs forward again, on other tensors."""
    model = block()

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    with f8.calibrate(model):
        for x in batches(2, 16, K):
            backward(run, x)
    assert sharing(model) == {("q", "k", "v"), ("gate", "up")}


def test_a_tensor_that_takes_the_place_of_another_in_memory_is_another_one() -> None:
    """Python gives ids again."""
    first, second = layers_of(f8.convert_to_float8_training(plain_mlp(K, K, K), config="delayed"))
    with f8.calibrate(model := nn.Sequential(first, second)), torch.no_grad():
        first(x := torch.randn(4, K))
        its_id, others = id(x), []
        del x
        while id(x := torch.randn(4, K)) != its_id:
            others.append(x)
            assert len(others) < 10_000, "else this asks nothing"
        second(x)
    assert sharing(model) == set()


def test_of_a_model_that_was_compiled_before_sharing_costs_no_second_compilation() -> None:
    model, (x,) = block(), batches(1, 16, K)
    run, counter = compile_counted(model)
    backward(run, x)
    with f8.calibrate(model):
        backward(run, x)
    train(model, run, [x] * 3)
    assert sharing(model)
    assert counter.frame_count == 2


def test_sharing_again_stays_as_it_is() -> None:
    model = block()
    for _ in range(2):
        with f8.calibrate(model):
            backward(model, batches(1, 16, K)[0])
        train(model, model, batches(2, 16, K))
        assert sharing(model) == {("q", "k", "v"), ("gate", "up")}


# mark_calibrated


def test_marked_a_model_compiles_to_the_steady_state() -> None:
    """A tensor without a scale gets 1, a weight that of its amax."""
    model = mlp(K, 48, K)
    f8.mark_calibrated(model)
    assert all(evidence(model).values())
    for layer in layers_of(model):
        scales = {role: entry.scale.item() for role, entry in scales_of(layer).items()}
        assert scales == {"input": 1, "grad_output": 1, "weight": scale(layer.weight.abs().max().item(), E4M3)}
        assert all(entry.unscale == entry.scale.reciprocal() for entry in scales_of(layer).values())
    run, counter = compile_counted(model)
    train(model, run, batches(4, 8, K))
    assert counter.frame_count == 1
    assert model[0].input_scale.scale.item() == scale(max(x.abs().max().item() for x in batches(4, 8, K)), E4M3)


def test_marked_scales_that_are_there_stay() -> None:
    model = mlp(K, 48, K)
    train(model, model, batches(2, 8, K))
    before = state_of(model)
    f8.mark_calibrated(model)
    assert_same_bits(state_of(model), before)


def test_marked_on_meta_it_is_the_steady_states_graph_and_starts_afresh_elsewhere() -> None:
    """Scenario 26, for a preview."""
    with torch.device("meta"):
        model = plain_mlp(K, 48, K)
    f8.convert_to_float8_training(model, config="delayed")
    f8.mark_calibrated(model)
    assert all(evidence(model).values())
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(8, K, device="meta"))
    assert not any("reciprocal" in str(n.target) for n in graphs[0].graph.nodes)
    model.to_empty(device="cpu")
    assert not any(evidence(model).values())
    assert not any(t.any() for t in state_of(model).values())
    for layer in layers_of(model):
        layer.reset_parameters()
    train(model, model, batches(2, 8, K))
    assert all(evidence(model).values())


# reset_delayed_scaling


def test_after_a_reset_it_is_as_after_conversion() -> None:
    fresh, model = mlp(K, 48, K), mlp(K, 48, K)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if "fp8" not in name}
    train(model, model, batches(3, 8, K))
    f8.reset_delayed_scaling(model)
    assert_same_bits(state_of(model), state_of(fresh))
    assert evidence(model) == evidence(fresh)
    model.load_state_dict(weights)
    for one in (fresh, model):
        f8.reset_delayed_scaling(one)
        train(one, one, batches(3, 8, K))
    assert_same_bits({**state_of(model), **weights_of(model)}, {**state_of(fresh), **weights_of(fresh)})


def test_a_reset_of_a_compiled_model_costs_no_graph_that_it_had_not() -> None:
    model = mlp(K, 48, K)
    run, counter = compile_counted(model)
    train(model, run, batches(4, 8, K))
    assert counter.frame_count == 2
    f8.reset_delayed_scaling(model)
    train(model, run, batches(1, 8, K))
    assert all(evidence(model).values()), "found at once, as after the first step of all"
    train(model, run, batches(1, 8, K))
    assert counter.frame_count == 2


# float8_experimental's loop


def test_float8_experimentals_loop_runs_as_it_is() -> None:
    """Its sync comes after backward and before the step; its history, which it never wrote back, is one here."""
    model = mlp(K, 48, K)
    sync = torch.compile(f8.sync_float8_amax_and_scale_history, backend="aot_eager")
    optimizer, amaxes = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for x in batches(4, 8, K):
        optimizer.zero_grad()
        backward(model, x)
        amaxes.append(x.abs().max().item())
        sync(model)
        optimizer.step()
    assert model[0].input_scale.amax_history[:5].tolist() == [*amaxes[::-1], 0]
    for layer in layers_of(model):
        assert layer.weight_scale is not None
        assert layer.weight_scale.scale.item() == scale(layer.weight.abs().max().item(), E4M3)


def test_sync_takes_the_layers_that_are_known_already() -> None:
    model = mlp(K, 48, K)
    backward(model, batches(1, 8, K)[0])
    f8.sync_float8_amax_and_scale_history(model, fp8_layers=layers_of(model)[:1])
    assert {name.split(".")[0] for name, known in evidence(model).items() if known} == {"0"}


# A model without delayed scaling


BY_HAND: dict[str, Callable[[nn.Module], Any]] = {
    "update_delayed_scaling": f8.update_delayed_scaling,
    "sync_float8_amax_and_scale_history": f8.sync_float8_amax_and_scale_history,
    "reset_delayed_scaling": f8.reset_delayed_scaling,
    "mark_calibrated": f8.mark_calibrated,
    "calibrate": lambda model: f8.calibrate(model).__enter__(),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_without_a_delayed_layer_each_says_what_is_missing(name: str) -> None:
    for model in (plain_mlp(K, K), mlp(K, K, config="rowwise")):
        with pytest.raises(ValueError, match=r"Sequential has no layer with delayed scaling: .*config='delayed'"):
            BY_HAND[name](model)
