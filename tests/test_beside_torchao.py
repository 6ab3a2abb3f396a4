"""torchao.float8 and this package in one process and one model: neither disturbs the other's layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchao.float8
from delayed_checks import assert_same_bits, batches, gradients_of, plain_mlp, state_of, train
from fresh_process import run_python
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import float8_compile as f8

K, N = 32, 48
DATA = batches(4, 16, K)
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
TheirFloat8Linear = torchao.float8.float8_linear.Float8Linear


@pytest.fixture(autouse=True)
def _only_here(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao changes Inductor's code generation for the whole process when it converts; not for the tests after."""
    monkeypatch.setattr("torchao.float8._inductor_patch._patch_inductor_min_max_codegen", lambda: None)


def halves() -> Any:
    return nn.Sequential(plain_mlp(K, N, K), nn.Tanh(), plain_mlp(K, N, K))


def theirs_and_ours(recipe: str) -> Any:
    """A model whose first half is torchao's."""
    model = halves()
    torchao.float8.convert_to_float8_training(model[0])
    return f8.convert_to_float8_training(model, config=recipe)


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.shape[-1])).square().sum()


@every_recipe
def test_half_and_half_each_computes_what_it_would_alone(recipe: str) -> None:
    model, alone = theirs_and_ours(recipe), halves()
    torchao.float8.convert_to_float8_training(alone[0])
    f8.convert_to_float8_training(alone[2], config=recipe)
    loss_of(model(DATA[0])).backward()

    h = alone[1](alone[0](DATA[0]))
    between = h.detach().requires_grad_()
    loss_of(alone[2](between)).backward()
    h.backward(between.grad)
    assert len(gradients_of(model)) == 8
    assert_same_bits(gradients_of(model), gradients_of(alone))


@every_recipe
def test_half_and_half_trains_compiled_as_eagerly(recipe: str) -> None:
    eager, model = theirs_and_ours(recipe), theirs_and_ours(recipe)
    losses = train(eager, eager, [DATA[0]] * 4)
    again = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), [DATA[0]] * 4)
    assert losses == again
    assert losses[-1] < losses[0]
    assert_same_bits(state_of(model), state_of(eager))
    assert bool(state_of(model)) == (recipe == "delayed")


def test_our_conversion_leaves_torchaos_layers_and_says_so() -> None:
    model = halves()
    torchao.float8.convert_to_float8_training(model[0])
    before = [model[0][0], model[0][2]]
    f8.convert_to_float8_training(model)
    assert [model[0][0], model[0][2]] == before
    assert [(row.fqn, bool(row.recipe), row.reason) for row in f8.conversion_report(model)] == [
        ("0.0", False, "torchao's Float8Linear is a subclass of nn.Linear with a behaviour of its own"),
        ("0.2", False, "torchao's Float8Linear is a subclass of nn.Linear with a behaviour of its own"),
        ("2.0", True, ""),
        ("2.2", True, ""),
    ]
    f8.convert_from_float8_training(model)
    assert [type(layer) for layer in before] == [TheirFloat8Linear] * 2


def test_torchaos_conversion_takes_ours_unless_it_is_told_not_to() -> None:
    """It makes a new layer with the same parameters of every nn.Linear, and so of ours: what was ours is lost. With a
    filter, or where it converts first, both stay."""
    model = f8.convert_to_float8_training(plain_mlp(K, N, K), config="delayed")
    train(model, model, DATA[:2])
    layer, weight, scales = model[0], model[0].weight, state_of(model)

    torchao.float8.convert_to_float8_training(
        model, module_filter_fn=lambda linear, fqn: not isinstance(linear, f8.Float8Linear)
    )
    assert model[0] is layer
    assert_same_bits(state_of(model), scales)

    torchao.float8.convert_to_float8_training(model)
    assert [type(model[0]), type(model[2])] == [TheirFloat8Linear] * 2
    assert model[0].weight is weight
    assert state_of(model) == {}
    assert all(row.recipe is None for row in f8.conversion_report(model))
    train(model, model, DATA[2:4])  # nothing of ours is in the way
    assert type(layer) is f8.Float8Linear


@every_recipe
@pytest.mark.parametrize("config", [Float8WeightOnlyConfig, Int8WeightOnlyConfig])
def test_quantized_layers_beside_ours(recipe: str, config: Any) -> None:
    """As a frozen half: its layers are skipped with the reason, and gradients go through it to ours."""
    plain = halves().requires_grad_(True)
    plain[2].requires_grad_(False)
    quantize_(plain[2], config(set_inductor_config=False))
    model = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    kind = config.__name__.removesuffix("WeightOnlyConfig")
    reasons = {row.fqn: row.reason for row in f8.conversion_report(model) if row.recipe is None}
    assert reasons == dict.fromkeys(["2.0", "2.2"], f"its weight is torchao's {kind}Tensor, not a plain tensor")
    assert type(model[2][0].weight) is type(plain[2][0].weight)
    for each in (model, plain):
        loss_of(each(DATA[0])).backward()
    ours, expected = gradients_of(model), gradients_of(plain)
    assert ours.keys() == expected.keys() == {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}
    for name, gradient in ours.items():
        assert 0 < (gradient - expected[name]).norm() / expected[name].norm() < 0.2, name

    if recipe == "delayed":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        loss_of(run(DATA[0])).backward()
        assert_same_bits(gradients_of(model), ours)


BOTH = """
    import warnings
    warnings.simplefilter("ignore")  # torchao's own, of what it can't load here
    {imports}
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    torchao.float8.convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: fqn in "01")
    float8_compile.convert_to_float8_training(model, config="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(8, 32)).square().sum().backward()
        optimizer.step()
    print([type(layer).__module__ for layer in model], model[3].weight.double().sum().item())
"""


def test_either_may_be_imported_first() -> None:
    imports = ["import float8_compile", "import torchao.float8"]
    first, second = (run_python(BOTH.format(imports="; ".join(order))) for order in (imports, imports[::-1]))
    assert first == second
    assert first.startswith("['torchao.float8.float8_linear', 'torchao.float8.float8_linear', 'float8_compile.linear'")
