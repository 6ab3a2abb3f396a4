"""Conversion: in place, nothing lost, everything said, nothing half done, and back."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.float8
from fresh_process import run_python
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import float8_compile as f8
from float8_compile import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Recipe,
    ScalingType,
    auto_filter,
    conversion_report,
    convert_from_float8_training,
    convert_to_float8_training,
    float8_disabled,
)

TENSORWISE, ROWWISE = Recipe.from_name("tensorwise"), Recipe.from_name("rowwise")
every_recipe = pytest.mark.parametrize("recipe", Recipe.names())


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Two blocks and a head: linears "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


NAMES = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 32)


def converted_names(model: nn.Module) -> list[str]:
    return [row.fqn for row in conversion_report(model) if row.recipe is not None]


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.fqn: row.reason for row in conversion_report(model) if row.recipe is None}


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """All that a module is: its class, every attribute by identity, every parameter and buffer by its bits."""
    modules = [
        (name, type(module), {key: _frozen(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    ]
    return [*modules, *[(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]]


def _frozen(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, set)) else value


# Identity


def test_conversion_is_in_place() -> None:
    model = Net()
    modules, parameters = list(model.modules()), list(model.parameters())
    assert convert_to_float8_training(model) is model
    assert [id(module) for module in model.modules()] == [id(module) for module in modules]
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert converted_names(model) == NAMES


def test_a_root_linear_is_converted() -> None:
    layer = convert_to_float8_training(nn.Linear(32, 16))
    assert type(layer) is Float8Linear
    assert layer(batch()).shape == (8, 16)


@every_recipe
def test_no_byte_is_added_and_none_moves(recipe: str) -> None:
    model = Net()

    def bytes_of_state() -> dict[str, tuple[int, int]]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors}

    before = bytes_of_state()
    convert_to_float8_training(model, config=recipe)
    assert bytes_of_state() == before


def test_an_optimizer_made_before_conversion_still_works() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8_training(model)
    before = copy.deepcopy(model.state_dict())
    model(batch()).sum().backward()
    optimizer.step()
    assert all(not torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_eval_mode_attributes_and_frozen_parameters_stay() -> None:
    model = Net()
    model.blocks[0].eval()
    model.head.tag = 3
    model.head.bias.requires_grad_(False)
    convert_to_float8_training(model)
    assert [layer.training for layer in (model.blocks[0].up, model.blocks[1].up)] == [False, True]
    assert model.head.tag == 3
    model(batch()).sum().backward()
    assert (model.head.bias.grad, model.head.weight.grad is None) == (None, False)


HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_pre_hook": lambda module, args: None,
    "register_forward_hook": lambda module, args, output: None,
    "register_full_backward_pre_hook": lambda module, grad_output: None,
    "register_full_backward_hook": lambda module, grad_input, grad_output: None,
    "register_state_dict_pre_hook": lambda module, prefix, keep_vars: None,
    "register_state_dict_post_hook": lambda module, state, prefix, metadata: None,
    "register_load_state_dict_pre_hook": lambda module, state, prefix, metadata, strict, missing, odd, errors: None,
    "register_load_state_dict_post_hook": lambda module, incompatible: None,
}


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_still_fires(register: str) -> None:
    layer, calls = nn.Linear(32, 16), []
    getattr(layer, register)(lambda *args: calls.append(len(args)) or HOOKS[register](*args))
    convert_to_float8_training(layer)
    layer(batch().requires_grad_()).sum().backward()
    layer.load_state_dict(layer.state_dict())
    assert len(calls) == 1


def test_a_tied_head_stays_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 32)
            self.head = nn.Linear(32, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    def is_tied(model: nn.Module) -> bool:
        return model.head.weight is model.embedding.weight and len(list(model.parameters())) == 1

    model = convert_to_float8_training(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.arange(16)).square().sum().backward()
    optimizer.step()
    assert is_tied(model)

    other = convert_to_float8_training(Tied())
    other.load_state_dict(_saved_and_loaded(model.state_dict()))
    assert is_tied(other)
    assert torch.equal(other(torch.arange(16)), model(torch.arange(16)))
    assert is_tied(convert_from_float8_training(other))


def _saved_and_loaded(thing: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_a_module_registered_twice_is_converted_once() -> None:
    """It is reported under the first of its names, whether the second is beside the first or elsewhere."""
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, shared, nn.Sequential(shared))
    asked: list[str] = []
    convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: asked.append(fqn) or True)
    assert asked == converted_names(model) == ["0"]
    model(batch()).sum().backward()
    convert_from_float8_training(model)
    assert {type(layer) for layer in (model[0], model[1], model[2][0])} == {nn.Linear}


def test_a_pruned_linear_stays_pruned() -> None:
    """Pruning computes the weight in a hook and keeps it as a plain tensor."""
    layer = prune.l1_unstructured(nn.Linear(32, 16, bias=False), "weight", amount=0.5)
    unpruned = convert_to_float8_training(nn.Linear(32, 16, bias=False))
    unpruned.weight.data.copy_(layer.weight)
    convert_to_float8_training(layer)
    x = batch()
    assert torch.equal(layer(x), unpruned(x))
    layer(x).sum().backward()
    assert torch.equal(layer.weight_orig.grad == 0, layer.weight_mask == 0)


# What is left out, and why


class LoRALinear(nn.Linear):
    """Has parameters and a forward of its own, as peft's older layers."""

    def __init__(self, in_features: int, out_features: int, rank: int = 4) -> None:
        super().__init__(in_features, out_features)
        self.a = nn.Parameter(torch.randn(rank, in_features))
        self.b = nn.Parameter(torch.randn(out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class LoRA(nn.Module):
    """Wraps a linear, as peft's newer layers."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.a = nn.Linear(base_layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def test_a_subclass_is_reported_and_never_stripped() -> None:
    model = nn.Sequential(nn.Linear(32, 32), LoRALinear(32, 32))
    before = model[1](batch := torch.randn(4, 32))
    convert_to_float8_training(model)
    assert reasons(model) == {"1": "LoRALinear is a subclass of nn.Linear with a behaviour of its own"}
    assert torch.equal(model[1](batch), before)
    convert_from_float8_training(model)
    assert type(model[1]) is LoRALinear
    assert torch.equal(model[1](batch), before)


def test_a_subclass_of_ours_is_not_stripped_on_the_way_back() -> None:
    """What FSDP2's `fully_shard(layer)` makes of a Float8Linear is one: without its class it is no longer sharded."""

    class Mine(Float8Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), Mine(32, 32))
    convert_to_float8_training(model)
    with pytest.raises(TypeError, match=r"'1' is a Mine, a subclass of Float8Linear"):
        convert_from_float8_training(model)
    assert [type(layer) for layer in model] == [Float8Linear, Mine]


def test_a_wrapper_around_a_base_layer_works() -> None:
    model = nn.Sequential(LoRA(nn.Linear(32, 64)), nn.ReLU(), LoRA(nn.Linear(64, 32)))
    convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: fqn.endswith("base_layer"))
    assert converted_names(model) == ["0.base_layer", "2.base_layer"]
    model(batch()).sum().backward()
    has_grad = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert has_grad == {"0.a.weight", "0.b.weight", "2.a.weight", "2.b.weight"}
    assert not model[0].b.weight.grad.isnan().any()


@pytest.mark.parametrize(
    ("build", "fqn", "reason"),
    [
        (lambda: nn.MultiheadAttention(32, 2), "out_proj", "nn.MultiheadAttention reads its weight"),
        (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(32, 8), "", "nn.MultiheadAttention reads its"),
        (lambda: parametrizations.weight_norm(nn.Linear(32, 8)), "", "ParametrizedLinear is a subclass"),
        (lambda: nn.LazyLinear(8), "", "LazyLinear "),
        (lambda: nn.Linear(32, 8, dtype=torch.float64), "", "its weight is torch.float64"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_is(build: Callable[[], nn.Module], fqn: str, reason: str) -> None:
    module = build()
    kind = type(module.get_submodule(fqn))
    with pytest.warns(UserWarning, match="no layer was converted to float8"):
        convert_to_float8_training(module)
    assert type(module.get_submodule(fqn)) is kind
    assert reasons(module)[fqn].startswith(reason)


def test_attention_runs_with_its_neighbours_converted() -> None:
    layer = convert_to_float8_training(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))
    assert converted_names(layer) == ["linear1", "linear2"]
    layer(torch.randn(2, 4, 32)).sum().backward()


def test_a_lazy_linear_is_converted_once_it_has_a_weight() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(8))
    convert_to_float8_training(model)
    model(batch())
    assert converted_names(convert_to_float8_training(model)) == ["0", "1"]


def test_a_filter_that_matches_nothing_warns_with_the_reasons() -> None:
    expected = r"^no layer was converted to float8\n  0: left out by module_filter_fn$"
    with pytest.warns(UserWarning, match=expected) as caught:
        convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), module_filter_fn=lambda linear, fqn: False)
    assert caught[0].filename == __file__  # where the user called it


def test_a_model_without_linears_warns() -> None:
    with pytest.warns(UserWarning, match="there is no nn.Linear in it"):
        convert_to_float8_training(nn.Sequential(nn.ReLU()))


def test_a_skipped_name_that_matches_nothing_warns() -> None:
    with pytest.warns(UserWarning, match="skip='haed' matches no linear layer: a typing error?"):
        convert_to_float8_training(nn.Linear(4096, 2048), module_filter_fn=auto_filter("tensorwise", skip=["haed"]))


def test_a_filter_sees_every_linear_with_its_name() -> None:
    model, seen = Net(), {}
    convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: bool(seen.setdefault(fqn, linear)) or True)
    assert seen == {name: model.get_submodule(name) for name in NAMES}


# Names under wrappers


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        nn.DataParallel,
        checkpoint_wrapper,
        nn.parallel.DistributedDataParallel,
        lambda model: nn.parallel.DistributedDataParallel(compiled(checkpoint_wrapper(model))),
    ],
    ids=["compile", "DataParallel", "checkpoint", "DDP", "DDP of compile of checkpoint"],
)
@pytest.mark.usefixtures("_one_process_group")
def test_a_wrapper_does_not_show_in_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = convert_to_float8_training(wrap(Net()))
    assert converted_names(model) == NAMES


def test_a_wrapper_inside_the_model_does_not_show_in_names() -> None:
    model = Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = compiled(model.blocks[1])
    assert converted_names(convert_to_float8_training(model)) == NAMES


def test_fsdp1s_wrapper_does_not_show_in_names() -> None:
    """Its constructor wants an accelerator; the attribute that it keeps the model under is what counts."""
    wrapper = nn.Module()
    wrapper._fsdp_wrapped_module = Net()
    assert converted_names(convert_to_float8_training(wrapper)) == NAMES


@given(st.sampled_from(["module", "model", "orig_mod", "wrapped_module", "_module", "layers"]))
def test_a_name_of_ones_own_stays(name: str) -> None:
    parent = nn.Module()
    parent.add_module(name, nn.Sequential(nn.Linear(32, 32)))
    assert converted_names(convert_to_float8_training(parent)) == [f"{name}.0"]


# Configurations

DELAYED_CONFIG = Float8LinearConfig(*[CastConfig(ScalingType.DELAYED), None] * 3)


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (ROWWISE, ROWWISE),
        ("rowwise", ROWWISE),
        ("RowWise", ROWWISE),
        (Float8LinearRecipeName.ROWWISE, ROWWISE),
        (torchao.float8.Float8LinearRecipeName.ROWWISE, ROWWISE),
        (Float8LinearConfig(), TENSORWISE),
        (Float8LinearConfig.from_recipe_name("rowwise"), ROWWISE),
        (DELAYED_CONFIG, Recipe.from_name("delayed")),
        (torchao.float8.Float8LinearConfig(), TENSORWISE),
        (torchao.float8.Float8LinearConfig.from_recipe_name("rowwise"), ROWWISE),
        (None, TENSORWISE),
    ],
    ids=lambda thing: type(thing).__module__.split(".")[0] + "." + str(getattr(thing, "name", thing))[:20],
)
def test_a_config_is_understood_in_any_form(config: Any, recipe: Recipe) -> None:
    assert convert_to_float8_training(nn.Linear(32, 16), config=config).recipe == recipe
    if config is not None:
        assert convert_to_float8_training(nn.Linear(32, 16), config=lambda linear, fqn: config).recipe == recipe


def test_tensorwise_is_the_default() -> None:
    assert convert_to_float8_training(nn.Linear(32, 16)).recipe == TENSORWISE


def test_a_callable_chooses_by_layer_and_none_leaves_it_out() -> None:
    choice = {"blocks.0.up": "rowwise", "head": torchao.float8.Float8LinearConfig(), "blocks.1.down": ROWWISE}
    model = convert_to_float8_training(Net(), config=lambda linear, fqn: choice.get(fqn))
    chosen = {row.fqn: row.recipe and row.recipe.name for row in conversion_report(model)}
    assert chosen == {
        "blocks.0.up": "rowwise",
        "blocks.0.down": None,
        "blocks.1.up": None,
        "blocks.1.down": "rowwise",
        "head": "tensorwise",
    }
    assert reasons(model)["blocks.1.up"] == "left out by config"


def test_a_callable_object_is_a_callable() -> None:
    class ByWidth:
        def __call__(self, linear: nn.Linear, fqn: str) -> str:
            return "rowwise" if linear.in_features > 32 else "tensorwise"

    model = convert_to_float8_training(Block(), config=ByWidth())
    assert (model.up.recipe, model.down.recipe) == (TENSORWISE, ROWWISE)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"recipe": "rowwise"}, TypeError, r"config=\{'recipe': 'rowwise'\}: expected a Recipe, one of the names"),
        (3, TypeError, "config=3: expected a Recipe, one of the names tensorwise, rowwise, .*delayed.*or a callable"),
        (True, TypeError, "config=True: expected"),
        (Recipe, TypeError, "config=<class 'float8_compile.recipe.Recipe'>: expected"),
        (Float8LinearRecipeName, TypeError, "config=<enum 'Float8LinearRecipeName'>: expected"),
        (Float8LinearConfig, TypeError, "config=<class 'float8_compile.compat.Float8LinearConfig'>: expected"),
        ("rowwize", ValueError, "unknown recipe 'rowwize': the recipes are tensorwise, rowwise, rowwise_with_gw_hp"),
        ("", ValueError, "unknown recipe ''"),
    ],
)
@pytest.mark.parametrize("build", [Net, nn.ReLU], ids=["some linears", "no linear"])
def test_a_config_that_is_none_is_refused_at_once(
    build: Callable[[], nn.Module], config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_to_float8_training(build(), config=config)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"convert_to_float8_training needs an nn\.Module, got list"):
        convert_to_float8_training([nn.Linear(32, 32)])


def test_converting_again_changes_the_recipe() -> None:
    model = convert_to_float8_training(Net(), recompute_weight_cast=False)
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda linear, fqn: fqn != "head")
    assert [(row.fqn, row.recipe) for row in conversion_report(model)] == [
        *[(name, ROWWISE) for name in NAMES[:-1]],
        ("head", TENSORWISE),  # left as it is
    ]


def test_recompute_weight_cast_is_set_for_all_or_by_layer() -> None:
    model = convert_to_float8_training(Net())
    assert {model.get_submodule(name).recompute_weight_cast for name in NAMES} == {True}
    convert_to_float8_training(model, recompute_weight_cast=False)
    assert {model.get_submodule(name).recompute_weight_cast for name in NAMES} == {False}
    convert_to_float8_training(model, recompute_weight_cast=lambda linear, fqn: fqn.endswith("up"))
    assert [model.get_submodule(name).recompute_weight_cast for name in NAMES] == [True, False, True, False, False]


# Failing half-way


def stumble(*_: Any) -> Any:
    raise LookupError("half-way")


def only_on_the_last(good: Any, bad: Callable[..., Any]) -> Callable[[nn.Linear, str], Any]:
    return lambda linear, fqn: bad(linear, fqn) if fqn == "head" else good


FAILURES = {
    "filter raises": ({"module_filter_fn": only_on_the_last(True, stumble)}, LookupError, "half-way"),
    "config raises": ({"config": only_on_the_last("rowwise", stumble)}, LookupError, "half-way"),
    "config gives a dict": ({"config": only_on_the_last("rowwise", lambda *_: {})}, TypeError, r"'head'.*config=\{\}"),
    "config gives a typo": (
        {"config": only_on_the_last("rowwise", lambda *_: "rowwize")},
        ValueError,
        "'head'.*unknown recipe 'rowwize'",
    ),
    "recompute raises": ({"recompute_weight_cast": only_on_the_last(True, stumble)}, LookupError, "half-way"),
    "recompute gives None": (
        {"recompute_weight_cast": only_on_the_last(True, lambda *_: None)},
        TypeError,
        "recompute_weight_cast is None for layer 'head': expected True or False",
    ),
    "recompute is a string": ({"recompute_weight_cast": "no"}, TypeError, "recompute_weight_cast is 'no' for layer"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("before", [lambda model: model, convert_to_float8_training], ids=["plain", "converted"])
def test_a_conversion_that_fails_leaves_the_model_as_it_was(
    before: Callable[[nn.Module], nn.Module], arguments: Any, error: type[Exception], message: str
) -> None:
    model = before(Net())
    was = snapshot(model)
    with pytest.raises(error, match=message):
        convert_to_float8_training(model, **arguments)
    assert snapshot(model) == was


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = Net()
    was = snapshot(model)
    with pytest.raises(UserWarning, match="no layer was converted"):
        convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: False)
    assert snapshot(model) == was


def test_a_gpu_without_float8_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    was = snapshot(model)
    missing = {"tensorwise": "NVIDIA A100 (compute capability 8.0) has no float8 GEMM"}  # as test_filters.py has it
    lacks = "float8_compile.convert.missing_gpu_support"
    monkeypatch.setattr(lacks, lambda device, recipe: missing.get(recipe.name))
    with pytest.raises(RuntimeError, match=r"'head' is on cpu: NVIDIA A100 .*emulate=True.*or leave it out with"):
        convert_to_float8_training(model, config=lambda linear, fqn: "tensorwise" if fqn == "head" else "rowwise")
    assert snapshot(model) == was


def test_the_snapshot_sees_what_conversion_changes() -> None:
    model = Net()
    was = snapshot(model)
    assert snapshot(convert_to_float8_training(model)) != was


# The way back


@every_recipe
def test_converted_back_nothing_is_left_of_it(recipe: str) -> None:
    model = nn.Sequential(Net(), LoRALinear(16, 16), nn.Linear(16, 8))
    was = snapshot(model)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda linear, fqn: fqn != "2")
    assert snapshot(model) != was
    assert convert_from_float8_training(model) is model
    assert snapshot(model) == was


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Float8WeightOnlyConfig])
def test_converted_back_a_model_can_be_quantized(config: type) -> None:
    model = convert_to_float8_training(Net().bfloat16())
    x = batch().bfloat16()
    convert_from_float8_training(model)
    expected = model(x)
    quantize_(model, config(set_inductor_config=False))  # else torchao sets Inductor up for all later tests
    torch.testing.assert_close(model(x), expected, rtol=0.1, atol=0.1)


def test_converted_back_a_model_trains_as_it_would_have() -> None:
    model, x = Net(), batch()
    plain = copy.deepcopy(model)
    convert_from_float8_training(convert_to_float8_training(model))
    model(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# The report


def test_the_report_has_a_row_for_every_linear() -> None:
    model = convert_to_float8_training(Net(), module_filter_fn=lambda linear, fqn: "blocks.1" not in fqn)
    assert [(row.fqn, row.k, row.n, row.recipe, row.reason) for row in conversion_report(model)] == [
        ("blocks.0.up", 32, 64, TENSORWISE, ""),
        ("blocks.0.down", 64, 32, TENSORWISE, ""),
        ("blocks.1.up", 32, 64, None, "left out by module_filter_fn"),
        ("blocks.1.down", 64, 32, None, "left out by module_filter_fn"),
        ("head", 32, 16, TENSORWISE, ""),
    ]


def test_the_report_prints_as_a_table() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(512), nn.Linear(4096, 8192), nn.Linear(8192, 10), nn.Linear(4096, 8192))
    convert_to_float8_training(model, module_filter_fn=auto_filter("tensorwise", skip=["0.down"]))
    convert_to_float8_training(model[3])
    assert str(conversion_report(model)) == (
        "layer      K     N  recipe, or why not\n"
        "------  ----  ----  -----------------------------------------------------------------\n"
        "0.up     512  1024  - too little to gain: x 0.62 by roofline (H100, 8192 tokens)\n"
        "0.down  1024   512  - skipped by name ('0.down')\n"
        "1       4096  8192  tensorwise, x 1.59 by roofline (H100, 8192 tokens)\n"
        "2       8192    10  - K=8192, N=10: not multiples of 16, so each GEMM would be padded\n"
        "3       4096  8192  tensorwise\n"
        "2 of 5 linear layers run in float8; their weights are 98% of the model's parameters"
    )


def test_the_report_counts_a_tied_weight_once_and_what_is_no_linear() -> None:
    """Such as experts in one parameter, which have no row."""
    model = nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 48, bias=False))
    model[1].weight = model[0].weight
    assert conversion_report(convert_to_float8_training(model)).share == 1
    model.experts = nn.Parameter(torch.zeros(3, 16, 32))
    assert conversion_report(model).share == 0.5
    assert conversion_report(nn.ReLU()).share == 0


def test_a_root_and_an_unconverted_layer_have_words_in_the_report() -> None:
    assert "(root)  32  16  - never converted" in str(conversion_report(nn.Linear(32, 16)))


# float8_disabled


def plain_and_converted() -> tuple[nn.Module, nn.Module]:
    plain = Net()
    return plain, convert_to_float8_training(copy.deepcopy(plain))


def test_disabled_layers_are_linear_layers_to_the_bit() -> None:
    (plain, model), x = plain_and_converted(), batch()
    assert not torch.equal(model(x), plain(x))
    with float8_disabled(model) as inside:
        assert inside is model
        output = model(x)
    output.sum().backward()
    plain(x).sum().backward()
    assert torch.equal(output, plain(x))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_disabled_ends_with_the_block_however_it_ends() -> None:
    (plain, model), x = plain_and_converted(), batch()
    in_float8 = model(x)
    with contextlib.suppress(LookupError), float8_disabled(model):
        raise LookupError
    assert torch.equal(model(x), in_float8)
    with float8_disabled(model), float8_disabled(model.head):
        pass
    assert torch.equal(model(x), in_float8)
    with float8_disabled(model):
        with float8_disabled(model):
            pass
        assert torch.equal(model(x), plain(x))
    with float8_disabled(model.blocks):
        assert not torch.equal(model(x), plain(x))


def test_disabled_holds_under_compile() -> None:
    (plain, model), x = plain_and_converted(), batch()
    fast = compiled(model)
    in_float8 = fast(x)
    with float8_disabled(model):
        assert torch.equal(fast(x), plain(x))
    assert torch.equal(fast(x), in_float8)


def test_a_model_converted_after_it_was_compiled_runs_in_float8() -> None:
    model, x = Net(), batch()
    fast = compiled(model)
    in_high_precision = fast(x)
    convert_to_float8_training(fast)
    assert torch.equal(fast(x), model(x))
    convert_from_float8_training(fast)
    assert torch.equal(fast(x), in_high_precision)


# Saving and copying


# float8_experimental's names of delayed scales
DELAYED_KEYS = [
    *[f"fp8_{name}_{role}" for role in ("input", "grad_output") for name in ("amax", "amax_history", "scale")],
    "fp8_scale_weight",
]


@every_recipe
def test_the_state_dict_is_a_plain_models_and_delayed_scales(recipe: str) -> None:
    plain, model = Net(), convert_to_float8_training(Net(), config=recipe)
    more = {f"{name}.{key}" for name in NAMES for key in DELAYED_KEYS} if recipe == "delayed" else set()
    assert model.state_dict().keys() == plain.state_dict().keys() | more
    assert [key for key in model.state_dict() if key not in more] == list(plain.state_dict())
    assert {type(tensor) for tensor in model.state_dict().values()} == {Tensor}
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(f8.plain_state_dict(model), strict=True)


@every_recipe
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: _saved_and_loaded(model, weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_the_same_layer_and_another(recipe: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = convert_to_float8_training(Net(), config=recipe, recompute_weight_cast=False), batch()
    other = copied(model)
    assert torch.equal(other(x), model(x))
    assert repr(other) == repr(model)
    assert other.head.weight is not model.head.weight
    convert_from_float8_training(other)
    assert converted_names(model) == NAMES


def test_a_state_dict_loads_where_there_is_only_torch(tmp_path: Path) -> None:
    for recipe in Recipe.names():
        model = convert_to_float8_training(Net(), config=recipe)
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch()).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / recipe)
    printed = run_python(
        """
        import pathlib, torch
        for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            saved = torch.load(file, weights_only=True)
            tensors = [*saved["model"].values(), *(t for s in saved["optimizer"]["state"].values() for t in s.values())]
            print(file.name, len(saved["model"]), *{type(tensor).__name__ for tensor in tensors})
        """,
        str(tmp_path),
        blocked=("float8_compile", "torchao"),
    )
    counts = {recipe: 8 + (len(NAMES) * len(DELAYED_KEYS) if recipe == "delayed" else 0) for recipe in Recipe.names()}
    assert printed.splitlines() == [f"{recipe} {counts[recipe]} Tensor" for recipe in sorted(counts)]


# Meta device


@every_recipe
def test_a_model_built_on_meta_is_the_same_every_time(recipe: str) -> None:
    def built() -> nn.Module:
        with torch.device("meta"):
            model = Net()
        convert_to_float8_training(model, config=recipe).to_empty(device="cpu")
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        model(torch.ones(8, 32)).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model

    first, second = built(), built()
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_nobody_holds_a_tensor_of_the_meta_model() -> None:
    with torch.device("meta"):
        model = convert_to_float8_training(Net())
    orphans = [weakref.ref(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    model.to_empty(device="cpu")
    gc.collect()
    assert [orphan() for orphan in orphans if orphan() is not None and orphan().is_meta] == []
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    assert held == []


def test_a_layer_is_built_like_a_linear() -> None:
    layer = Float8Linear(32, 16, bias=False, device="meta", dtype=torch.bfloat16, recipe="rowwise")
    assert (layer.weight.is_meta, layer.weight.dtype, layer.bias, layer.recipe) == (True, torch.bfloat16, None, ROWWISE)
    assert f8.conversion_report(layer)[0].recipe == ROWWISE
