"""torchao's AdamWFp8, whose states are float8 (MS-AMP's O2), for converted models: they train, delayed scales and
cached weights see its step, and on the task of `scripts/train` it ends within 1 % of AdamW with float32 states."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delayed_checks import assert_same_bits, batches, layers_of, mlp, state_of, train, weights_of
from oracles import E4M3, scale
from torch import Tensor, nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.subclass_fp8 import OptimStateFp8

import float8_compile as f8
from byte_lm import optimizers
from byte_lm.data import Text, load_text
from byte_lm.optimizers import state_bytes
from byte_lm.settings import BASELINE, SIZES, Settings
from byte_lm.training import Trainer

K, N = 64, 128  # weights of 8192 elements; AdamWFp8 leaves what is smaller than 4096 in the parameter's dtype
BLOCK = 256
LARGE = 4096
DATA = batches(4, 16, K)

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:OptimStateFp8 does not implement _stable_hash_for_caching"),
]
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


@pytest.fixture(params=[False, True], ids=["eager", "aot_eager"])
def compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The model and the step: AdamWFp8 compiles its own without being asked, with Inductor."""
    traced: bool = request.param
    with torch.compiler.set_stance(force_backend="aot_eager") if traced else torch.compiler.set_stance("force_eager"):
        yield traced


def built(recipe: str, compiled: bool = False) -> tuple[nn.Sequential, Any, AdamWFp8]:
    """A model, what runs it, and its optimizer; the same each time."""
    model = mlp(K, N, K, config=recipe)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    return model, run, AdamWFp8(model.parameters(), lr=1e-2)


def expected_bytes(parameter: Tensor) -> int:
    """Two states, in float8 with a float32 scale a block, or in the parameter's dtype; and the count of steps."""
    size = parameter.numel()
    each = size + 4 * (size // BLOCK) if size >= LARGE else size * parameter.element_size()
    return 2 * each + 4


@every_recipe
def test_a_model_trains_and_the_states_of_its_weights_are_float8(recipe: str, compiled: bool) -> None:
    model, run, optimizer = built(recipe, compiled)
    losses = train(model, run, DATA[:1] * 8, optimizer)
    assert losses[-1] < losses[0] / 2
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][name]
            assert isinstance(state, OptimStateFp8) == (parameter.numel() >= LARGE)
            if isinstance(state, OptimStateFp8):
                assert state.codes.dtype is E4M3
                assert state.codes.float().count_nonzero() > parameter.numel() / 2
    assert state_bytes(optimizer) == sum(map(expected_bytes, model.parameters()))


@torch.compiler.set_stance("force_eager")
def test_bfloat16_parameters_train_too() -> None:
    model, _, _ = built("rowwise")
    model.bfloat16()
    optimizer = AdamWFp8(model.parameters(), lr=1e-2)
    losses = train(model, model, [DATA[0].bfloat16()] * 8, optimizer)
    assert losses[-1] < losses[0] / 2
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    assert state_bytes(optimizer) == sum(map(expected_bytes, model.parameters()))


def test_delayed_scales_move_on_after_its_step(compiled: bool) -> None:
    model, run, optimizer = built("delayed", compiled)
    for x in DATA:
        before, weights = state_of(model), weights_of(model)
        train(model, run, [x], optimizer)
        after = state_of(model)
        for fqn, layer in model.named_children():
            if isinstance(layer, f8.Float8Linear):
                assert not torch.equal(layer.weight, weights[f"{fqn}.weight"])
                assert after[f"{fqn}.weight.scale"] == scale(layer.weight.abs().max().item(), E4M3)
                for role in ("input", "grad_output"):
                    history = f"{fqn}.{role}.amax_history"
                    assert torch.equal(after[history][1:], before[history][:-1])
                    assert after[history][0] > 0
                    assert after[f"{fqn}.{role}.amax"] == 0
        assert after["0.input.amax_history"][0] == x.abs().max()


def assert_cast_of(weight: Tensor, operand: Any) -> None:
    """Within half a unit in the last place of e4m3: 1/16 of a normal number, 2**-10 below them."""
    back = operand.payload.float() * operand.unscale
    assert ((back - weight).abs() <= weight.abs() / 16 + operand.unscale * 2**-10).all()


@every_recipe
def test_cached_weights_are_cast_again_after_its_step(recipe: str, compiled: bool) -> None:
    model, run, optimizer = built(recipe, compiled)
    twin, run_twin, twin_optimizer = built(recipe, compiled)
    f8.cache_weight_casts(model)
    for x in DATA:
        weights = weights_of(model)
        losses, expected = train(model, run, [x], optimizer), train(twin, run_twin, [x], twin_optimizer)
        assert_same_bits({"loss": losses[0], **weights_of(model)}, {"loss": expected[0], **weights_of(twin)})
        for number, layer in enumerate(layers_of(model)):
            assert layer.cached_weight is not None
            # Read as the step has left it: a forward would cast a weight that has changed.
            for operand in filter(None, (layer.cached_weight.output, layer.cached_weight.grad_input)):
                assert_cast_of(layer.weight, operand)
                with pytest.raises(AssertionError):
                    assert_cast_of(weights[f"{2 * number}.weight"], operand)
        assert_same_bits({"output": run(x)}, {"output": run_twin(x)})


def test_inductors_step_is_seen_too() -> None:
    """What AdamWFp8 does when left alone. One graph: both weights have as many rows as columns, and no bias."""
    model = nn.Sequential(nn.Linear(K, K, bias=False), nn.GELU(), nn.Linear(K, K, bias=False))
    f8.convert_to_float8_training(model, config="delayed")
    f8.cache_weight_casts(model)
    losses = train(model, model, DATA[:1] * 4, AdamWFp8(model.parameters(), lr=1e-2))
    assert losses[-1] < losses[0]
    for layer in layers_of(model):
        assert layer.weight_scale is not None
        assert layer.cached_weight is not None
        assert layer.weight_scale.scale.item() == scale(layer.weight.abs().max().item(), E4M3)
        assert_cast_of(layer.weight, layer.cached_weight.output)


@torch.compiler.set_stance("force_eager")
def test_its_states_survive_a_file() -> None:
    """Loaded with weights_only=True, and then the same bits as without the interruption."""
    model, _, optimizer = built("delayed")
    train(model, model, DATA[:2], optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, model, DATA[2:], optimizer)

    resumed, _, resumed_optimizer = built("delayed")
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    train(resumed, resumed, DATA[2:], resumed_optimizer)
    assert_same_bits(weights_of(resumed), weights_of(model))
    for parameter, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            state, other = (o.state[p][name] for o, p in ((resumed_optimizer, parameter), (optimizer, expected)))
            assert type(state) is type(other)
            assert torch.equal(*(s.dequantize() if isinstance(s, OptimStateFp8) else s for s in (state, other)))


@torch.compiler.set_stance("force_eager")
def test_its_steps_are_not_bounded_as_adams_are() -> None:
    """A warning more than a wish: e4m3 loses the second moment of an element 1000 times smaller than its block's
    largest, and keeps the first. When this fails torchao has mended it: take the warning out of optimizers.py."""

    def second_step(kind: Any) -> float:
        """The largest, in learning rates, where the second gradient of the small elements is zero."""
        weight = nn.Parameter(torch.zeros(LARGE // BLOCK, BLOCK))
        optimizer = kind([weight], lr=1e-3, weight_decay=0.0)
        weight.grad = torch.full_like(weight, 1e-3)
        weight.grad[:, 0] = 1.0
        optimizer.step()
        before = weight.detach().clone()
        weight.grad[:, 1:] = 0.0
        optimizer.step()
        return (weight - before).abs().max().item() / 1e-3

    assert second_step(torch.optim.AdamW) < 1.01
    assert second_step(AdamW8bit) < 1.01
    assert second_step(AdamWFp8) > 1000


# The task of scripts/train, shortened: the tiny model, 20 steps, its own text and batches

SEEDS = 0, 1
STEPS = 20
# Of the held-out loss. Float8 states end 0.1 to 0.2 % above float32 ones, with an element's overlong step 1.1 % (2 runs
# of 36); states of 4 bits 4 %, and a learning rate that doesn't arrive 12 %.
BOUND = 0.01


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text(None, SIZES["tiny"].context)


def held_out_loss(recipe: str, optimizer: str, seed: int, text: Text) -> float:
    settings = Settings(
        recipes=(BASELINE,), size="tiny", steps=STEPS, batch=8, seed=seed, data=None, compile=False, optimizer=optimizer
    )
    trainer = Trainer(settings, recipe, text)
    trainer.first_pass()
    for _ in range(STEPS):
        trainer.step()
    trainer.validate()
    loss = trainer.progress.validation_loss
    assert loss is not None
    return loss


def excess(recipe: str, text: Text) -> float:
    """How much higher the held-out loss is with adamw8 than with adamw: the mean of both seeds, as a fraction."""
    return statistics.fmean(
        held_out_loss(recipe, "adamw8", seed, text) / held_out_loss(recipe, "adamw", seed, text) - 1 for seed in SEEDS
    )


@every_recipe
def test_loss_is_within_one_percent_of_float32_states(recipe: str, text: Text) -> None:
    assert abs(excess(recipe, text)) < BOUND


def test_states_of_four_bits_would_not_pass(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "adamw8", lambda: AdamW4bit)
    assert excess("delayed", text) > 2 * BOUND
