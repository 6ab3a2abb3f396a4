"""After training: evaluated in high precision, converted back, and quantized for inference by torchao, on a CPU.

Errors are relative, in the norm, of an MLP with two layers. float8's rounding of both weights, per row, makes 3.5 %,
and of the activations as well 5 %: the bounds are twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_checks import batches, mlp, train
from torch import Tensor, nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    PerRow,
    PerTensor,
    quantize_,
)

import float8_compile as f8

BF16 = torch.bfloat16
K, N = 64, 128
DATA = [x.to(BF16) for x in batches(3, 32, K)]
X = DATA[2] / 3
pytestmark = pytest.mark.usefixtures("afresh")
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


def config(kind: Any, **options: Any) -> Any:
    """Else torchao sets Inductor up, for all later tests."""
    return kind(set_inductor_config=False, **options)


def bare(model: Any) -> None:
    train(model, model, DATA[:2])


def cached(model: Any) -> None:
    f8.cache_weight_casts(model)
    train(model, model, DATA[:2])


def calibrated(model: Any) -> None:
    if model[0].recipe.name == "delayed":
        with f8.calibrate(model):
            model(DATA[0])
    train(model, model, DATA[:2])


def compiled(model: Any) -> None:
    train(model, torch.compile(model, backend="aot_eager", fullgraph=True), DATA[:2])


TRAINED = {"bare": bare, "with cached weights": cached, "calibrated": calibrated, "compiled": compiled}


def trained(recipe: str, how: Callable[[Any], None] = bare) -> Any:
    """In bfloat16, trained, then frozen."""
    model = mlp(K, N, K, config=recipe).to(BF16)
    how(model)
    return model.eval().requires_grad_(False)


def error(y: Tensor, expected: Tensor) -> float:
    return ((y - expected).float().norm() / expected.float().norm()).item()


@every_recipe
@pytest.mark.parametrize("how", TRAINED.values(), ids=TRAINED)
def test_evaluated_then_converted_back_then_quantized(recipe: str, how: Callable[[Any], None]) -> None:
    """Scenario 47, as a user has it: after a training, one after the other."""
    model = trained(recipe, how)
    assert error(model(X), expected := disabled(model)) > 0.01, "it was in float8"
    f8.convert_from_float8_training(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert torch.equal(model(X), expected)
    quantize_(model, config(Float8WeightOnlyConfig))
    assert type(model[0].weight).__module__.startswith("torchao.")
    assert 0.01 < error(model(X), expected) < 0.07


def disabled(model: nn.Module) -> Tensor:
    with f8.float8_disabled(model):
        return model(X)


@pytest.mark.filterwarnings("ignore:Float8Tensor does not implement _stable_hash_for_caching")  # torchao's
def test_what_was_quantized_compiles() -> None:
    model = trained("delayed")
    expected = disabled(model)
    f8.convert_from_float8_training(model)
    quantize_(model, config(Float8WeightOnlyConfig))
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), model(X))
    assert error(torch.compile(model, fullgraph=True)(X), expected) < 0.07  # by Inductor


@every_recipe
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=["tensor", "row"])
def test_activations_quantized_as_well(recipe: str, granularity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao asks for a GPU before it does this. Its arithmetic then runs on a CPU too, and that is what is tried."""
    how = config(Float8DynamicActivationFloat8WeightConfig, granularity=granularity)
    model = trained(recipe)
    expected = disabled(model)
    f8.convert_from_float8_training(model)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="Float8 dynamic quantization requires CUDA"):
            quantize_(model, how)
        assert [type(layer.weight) for layer in (model[0], model[2])] == [nn.Parameter] * 2
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    quantize_(model, how)
    y = model(X)
    assert 0.01 < error(y, expected) < 0.1
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), y)


@every_recipe
def test_to_int8_with_dynamic_activations(recipe: str) -> None:
    """Which torchao does on a CPU without asking."""
    model = trained(recipe)
    expected = disabled(model)
    f8.convert_from_float8_training(model)
    quantize_(model, config(Int8DynamicActivationInt8WeightConfig))
    assert 0.001 < error(model(X), expected) < 0.03


@every_recipe
@pytest.mark.parametrize("how", [bare, cached])
def test_quantized_before_it_is_converted_back_it_raises_until_it_is(recipe: str, how: Callable[[Any], None]) -> None:
    """`quantize_` takes a Float8Linear for the nn.Linear that it is; nothing runs with other numbers unseen."""
    model = trained(recipe, how)
    expected = disabled(model)
    quantize_(model, config(Float8WeightOnlyConfig))
    for mode in (True, False):
        with pytest.raises(NotImplementedError, match="Float8Tensor dispatch"):
            model.train(mode)(X)
    f8.convert_from_float8_training(model)
    assert error(model(X), expected) < 0.07


def test_an_encoder_with_attention_is_quantized_where_it_was_in_float8() -> None:
    """A filter of torchao's takes the layers that a report names."""
    torch.manual_seed(0)
    model: Any = nn.TransformerEncoderLayer(K, 2, N, batch_first=True, dtype=BF16).eval().requires_grad_(False)
    f8.convert_to_float8_training(model)
    expected, names = disabled(model), {row.fqn for row in f8.conversion_report(model) if row.recipe is not None}
    f8.convert_from_float8_training(model)
    quantize_(model, config(Float8WeightOnlyConfig), filter_fn=lambda module, fqn: fqn in names)
    assert names == {"linear1", "linear2"}
    assert type(model.self_attn.in_proj_weight) is nn.Parameter
    with torch.no_grad():
        assert error(model(X.unsqueeze(0)), expected[None]) < 0.07
