"""torchao's names: a user's script runs after its import was replaced, and means what it meant."""

from __future__ import annotations

import enum
import inspect
from dataclasses import FrozenInstanceError, fields, replace
from itertools import combinations, product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torchao.float8
import torchao.float8.config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import float8_compile
from float8_compile import (
    Cast,
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Recipe,
    ScalingGranularity,
    ScalingType,
)
from float8_compile.compat import is_linear_config, recipe_from_config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERANDS = ("input", "weight", "grad_output")
TORCHAO_NAMES = [name.value for name in torchao.float8.Float8LinearRecipeName]
both_packages = pytest.mark.parametrize("package", [float8_compile, torchao.float8], ids=lambda module: module.__name__)

SCRIPT = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.float8 import (
    CastConfig, Float8GemmConfig, Float8LinearConfig, Float8LinearRecipeName, ScalingGranularity, ScalingType,
    _auto_filter_for_recipe, convert_to_float8_training,
)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32), nn.Linear(32, 1)).bfloat16()
x = torch.randn(96, 64, dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def module_filter_fn(mod: torch.nn.Module, fqn: str):
    if fqn == "1":
        return False
    if isinstance(mod, torch.nn.Linear):
        if mod.in_features % 16 != 0 or mod.out_features % 16 != 0:
            return False
    return True

config = Float8LinearConfig(
    cast_config_grad_output=CastConfig(
        scaling_type=ScalingType.DYNAMIC, scaling_granularity=ScalingGranularity.TENSORWISE
    ),
    gemm_config_output=Float8GemmConfig(use_fast_accum=True),
    enable_fsdp_float8_all_gather=False,
    pad_inner_dim=True,
)
convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)

output = model(x)
for _ in range(2):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), torch.ones_like(output))
    loss.backward()
    optimizer.step()

rowwise = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE)
large = nn.Sequential(nn.Linear(4096, 2048, device="meta"), nn.Linear(64, 64, device="meta"))
convert_to_float8_training(large, config=rowwise, module_filter_fn=_auto_filter_for_recipe("tensorwise", ["head"]))
names = [type(module).__name__ for module in [*model, *large]]
"""


def ran(script: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(script, "a user's script", "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings("ignore:skip='head' matches no linear layer")
def test_a_script_runs_after_its_import_was_replaced() -> None:
    ours, theirs = ran(SCRIPT.replace("torchao.float8", "float8_compile")), ran(SCRIPT)
    assert ours["names"] == theirs["names"] == ["Float8Linear", "Linear", "Linear", "Float8Linear", "Linear"]
    assert torch.equal(ours["output"], theirs["output"])
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=0.01, atol=0)


# The same words


@pytest.mark.parametrize("name", ["CastConfig", "Float8GemmConfig", "Float8LinearConfig"])
def test_a_config_class_has_torchaos_fields_and_defaults(name: str) -> None:
    ours, theirs = ({f.name: f.default for f in fields(getattr(p, name))} for p in (float8_compile, torchao.float8))
    assert list(ours) == list(theirs)
    plain = {key: value for key, value in theirs.items() if isinstance(value, (bool, type(None)))}
    assert {key: ours[key] for key in plain} == plain


@pytest.mark.parametrize(
    ("name", "more"),  # torchao had it until it deleted delayed scaling
    [("ScalingType", {"DELAYED": "delayed"}), ("ScalingGranularity", {}), ("Float8LinearRecipeName", {})],
)
def test_an_enum_has_torchaos_members(name: str, more: dict[str, str]) -> None:
    ours, theirs = ({m.name: m.value for m in getattr(p, name)} for p in (float8_compile, torchao.float8))
    assert ours == {**theirs, **more}


@pytest.mark.parametrize("name", ["convert_to_float8_training", "_auto_filter_for_recipe"])
def test_a_function_takes_torchaos_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(p, name)).parameters for p in (float8_compile, torchao.float8))
    assert {key: p.kind for key, p in theirs.items()}.items() <= {key: p.kind for key, p in ours.items()}.items()


# The same meaning


@pytest.mark.parametrize("name", TORCHAO_NAMES)
@both_packages
def test_a_recipes_config_is_our_preset_of_that_name(package: ModuleType, name: str) -> None:
    by_name = package.Float8LinearConfig.from_recipe_name(name)
    by_enum = package.Float8LinearConfig.from_recipe_name(package.Float8LinearRecipeName(name))
    assert recipe_from_config(by_name) == recipe_from_config(by_enum) == Recipe.from_name(name)


@both_packages
def test_emulation_is_the_recipes_and_does_not_cost_its_name(package: ModuleType) -> None:
    recipe = recipe_from_config(package.Float8LinearConfig(emulate=True))
    assert recipe == replace(Recipe.from_name("tensorwise"), emulate=True)


def delayed_config(*operands: str, **arguments: Any) -> Float8LinearConfig:
    """The way that torchao had to ask for delayed scales: a `CastConfig` for each operand."""
    casts = {f"cast_config_{name}": CastConfig(scaling_type=ScalingType.DELAYED) for name in operands}
    return Float8LinearConfig(**casts, **arguments)


def test_three_delayed_operands_are_the_recipe_delayed() -> None:
    recipe = recipe_from_config(delayed_config(*OPERANDS))
    assert (recipe, recipe.name) == (Recipe.from_name("delayed"), "delayed")
    emulated = recipe_from_config(delayed_config(*OPERANDS, emulate=True))
    assert emulated == replace(Recipe.from_name("delayed"), emulate=True)


@pytest.mark.parametrize(
    "operands", [chosen for size in range(4) for chosen in combinations(OPERANDS, size)], ids=lambda c: "+".join(c)
)
def test_each_operand_may_be_delayed(operands: tuple[str, ...]) -> None:
    """In both of its GEMMs, and the others stay what they are in tensorwise."""
    recipe = recipe_from_config(delayed_config(*operands))
    preset = Recipe.from_name("tensorwise")
    for name in OPERANDS:
        expected = Cast(E5M2 if name == "grad_output" else E4M3, "delayed") if name in operands else None
        assert recipe.delayed_cast(name) == expected
    assert recipe.casts_input_once
    assert recipe.casts_weight_once
    assert recipe.casts_gradient_once
    assert recipe.name == {(): "tensorwise", OPERANDS: "delayed"}.get(operands, "custom")
    as_dynamic = [replace(c, scaling="dynamic") for c in (recipe.output.left, recipe.output.right)]
    assert as_dynamic == [preset.output.left, preset.output.right]


def test_an_operand_may_be_delayed_in_one_of_its_gemms() -> None:
    dynamic = CastConfig()
    recipe = recipe_from_config(delayed_config("input", cast_config_input_for_grad_weight=dynamic))
    assert (recipe.output.left, recipe.grad_weight.right) == (Cast(E4M3, "delayed"), Cast(E4M3))


def test_a_lookalike_of_another_torchao_may_be_delayed() -> None:
    """An older one, whose enum has the member: it is asked for its value, not for its class."""
    config = torchao.float8.Float8LinearConfig()
    delayed = SimpleNamespace(**{**vars(config.cast_config_input), "scaling_type": Later.DELAYED, "target_dtype": None})
    lookalike = SimpleNamespace(**{**vars(config), **{f"cast_config_{name}": delayed for name in OPERANDS}})
    lookalike.cast_config_input_for_grad_weight = lookalike.cast_config_weight_for_grad_input = None
    lookalike.cast_config_grad_output_for_grad_weight = None
    assert recipe_from_config(lookalike) == Recipe.from_name("delayed")


def test_ours_takes_torchaos_enum_and_any_case() -> None:
    expected = Float8LinearConfig.from_recipe_name("rowwise")
    assert Float8LinearConfig.from_recipe_name("RowWise") == expected
    assert Float8LinearConfig.from_recipe_name(torchao.float8.Float8LinearRecipeName.ROWWISE) == expected


def test_another_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'rowwize': torchao's are tensorwise, rowwise, rowwise_with"):
        Float8LinearConfig.from_recipe_name("rowwize")


OVERRIDES = ("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")


def config_of(package: ModuleType, disabled: tuple[str, ...], **arguments: Any) -> Any:
    """A config with these operands disabled, and those of OVERRIDES that are not left dynamic."""
    casts = {}
    for operand in (*OPERANDS, *OVERRIDES):
        kind = package.ScalingType.DISABLED if operand in disabled else package.ScalingType.DYNAMIC
        casts[f"cast_config_{operand}"] = package.CastConfig(scaling_type=kind)
    return package.Float8LinearConfig(**casts, **arguments)


CHOICES = [chosen for size in range(7) for chosen in combinations((*OPERANDS, *OVERRIDES), size)]


@pytest.mark.parametrize("disabled", CHOICES, ids=lambda chosen: "+".join(chosen) or "none")
def test_disabled_operands_are_accepted_where_torchao_accepts_them(disabled: tuple[str, ...]) -> None:
    try:
        theirs = config_of(torchao.float8, disabled)
    except AssertionError:
        with pytest.raises(ValueError, match="both operands are float8 or both are high precision"):
            config_of(float8_compile, disabled)
    else:
        recipe = recipe_from_config(config_of(float8_compile, disabled))
        assert recipe == recipe_from_config(theirs)
        assert recipe.output.is_float8 == ("input" not in disabled)
        assert recipe.grad_input.is_float8 == ("grad_output" not in disabled)
        assert recipe.grad_weight.is_float8 == ("input_for_grad_weight" not in disabled)


@both_packages
def test_an_override_changes_one_gemm(package: ModuleType) -> None:
    row = package.CastConfig(scaling_granularity=package.ScalingGranularity.AXISWISE)
    recipe = recipe_from_config(package.Float8LinearConfig(cast_config_weight_for_grad_input=row))
    preset = Recipe.from_name("tensorwise")
    assert recipe.grad_input.right == Cast(E4M3, granularity="row")
    assert (recipe.output, recipe.grad_weight) == (preset.output, preset.grad_weight)


@both_packages
def test_an_operand_is_cast_in_both_of_its_gemms(package: ModuleType) -> None:
    row = package.CastConfig(scaling_granularity=package.ScalingGranularity.AXISWISE)
    recipe = recipe_from_config(package.Float8LinearConfig(cast_config_input=row, cast_config_grad_output=row))
    assert (recipe.output.left, recipe.grad_weight.right) == (Cast(E4M3, granularity="row"),) * 2
    assert recipe.grad_weight.right.granularity == recipe.grad_input.left.granularity == "row"


@both_packages
def test_the_settings_of_a_gemm_stay_with_it(package: ModuleType) -> None:
    config = package.Float8LinearConfig(
        gemm_config_output=package.Float8GemmConfig(use_fast_accum=False),
        gemm_config_grad_weight=package.Float8GemmConfig(use_fast_accum=True),
        round_scales_to_power_of_2=True,
    )
    recipe = recipe_from_config(config)
    gemms = (recipe.output, recipe.grad_input, recipe.grad_weight)
    assert [gemm.fast_accum for gemm in gemms] == [False, False, True]
    assert all(cast.power_of_two for gemm in gemms for cast in (gemm.left, gemm.right))


@given(st.lists(st.sampled_from([E4M3, E5M2]), min_size=3, max_size=3))
def test_a_dtype_is_taken_or_refused_with_its_gemm(dtypes: list[torch.dtype]) -> None:
    x, w, g = dtypes
    casts = {
        f"cast_config_{name}": CastConfig(target_dtype=dtype) for name, dtype in zip(OPERANDS, dtypes, strict=True)
    }
    if E5M2 in (x, w) and (x == w or g == E5M2):
        with pytest.raises(ValueError, match=r"e5m2 · e5m2\): no GPU multiplies it"):
            Float8LinearConfig(**casts)
    else:
        gemm = recipe_from_config(Float8LinearConfig(**casts)).grad_input
        assert (gemm.left.dtype, gemm.right.dtype) == (g, w)


def test_one_cast_config_may_serve_every_operand() -> None:
    """torchao writes the first operand's dtype into it, so gradients become e4m3 (STYLE.md); ours are values."""

    def gradient_of(package: ModuleType) -> torch.dtype | None:
        shared = package.CastConfig()
        config = package.Float8LinearConfig(
            cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared
        )
        return recipe_from_config(config).grad_input.left.dtype

    assert gradient_of(float8_compile) == E5M2
    assert gradient_of(torchao.float8) == E4M3  # what is guarded against: as the user's torchao would run it


def test_configs_are_values() -> None:
    assert Float8LinearConfig() == Float8LinearConfig()
    assert len({Float8LinearConfig(), Float8LinearConfig(), Float8LinearConfig(emulate=True)}) == 2
    with pytest.raises(FrozenInstanceError):
        Float8LinearConfig().emulate = True
    assert replace(Float8LinearConfig(), emulate=True).emulate


@pytest.mark.parametrize(
    "thing", [Float8LinearConfig(), torchao.float8.Float8LinearConfig(), None, "rowwise", Recipe.from_name("rowwise")]
)
def test_a_config_is_known_by_what_it_has(thing: object) -> None:
    assert is_linear_config(thing) == type(thing).__name__.endswith("Config")


@pytest.mark.parametrize("config", [Float8LinearConfig, torchao.float8.Float8LinearConfig])
def test_a_float8_all_gather_is_the_recipes(config: Any) -> None:
    expected = replace(Recipe.from_name("tensorwise"), fsdp_float8_all_gather=True)
    assert recipe_from_config(config(enable_fsdp_float8_all_gather=True)) == expected


# What no recipe can express


class Later(enum.Enum):
    """Members that torchao has had or may get."""

    DELAYED = "delayed"
    STATIC = "static"
    BLOCKWISE = "blockwise"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Float8LinearConfig(cast_config_weight=CastConfig(ScalingType.DISABLED)),
            r"e4m3 tensor · high precision\): both operands",
        ),
        (
            lambda: Float8LinearConfig(cast_config_input=CastConfig(target_dtype=torch.bfloat16)),
            r"dtype=torch.bfloat16\): expected a float8 dtype",
        ),
        (
            lambda: Float8LinearConfig(cast_config_input=CastConfig(scaling_type=Later.STATIC)),
            r"Later.STATIC: float8_compile knows DYNAMIC, DELAYED and DISABLED",
        ),
        (
            lambda: delayed_config(
                "weight",
                cast_config_input=CastConfig(ScalingType.DELAYED, ScalingGranularity.AXISWISE),
            ),
            r"scaling='delayed', granularity='row'\): .*use granularity='tensor', or scaling='dynamic'",
        ),
        (
            lambda: delayed_config(
                "grad_output",
                cast_config_grad_output_for_grad_weight=CastConfig(ScalingType.DELAYED, target_dtype=E4M3),
            ),
            "the grad_output is cast as e5m2 delayed and as e4m3 delayed, but has one delayed scale",
        ),
        (
            lambda: Float8LinearConfig(cast_config_input=CastConfig(scaling_granularity=Later.BLOCKWISE)),
            r"Later.BLOCKWISE: float8_compile knows TENSORWISE and AXISWISE",
        ),
    ],
)
def test_what_no_recipe_can_express_is_refused_when_it_is_built(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# _auto_filter_for_recipe


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", Float8LinearRecipeName.ROWWISE])
def test_the_auto_filter_is_torchaos(recipe: Any) -> None:
    ours = float8_compile._auto_filter_for_recipe(recipe, ["head"])
    theirs = torchao.float8._auto_filter_for_recipe(getattr(recipe, "value", recipe), filter_fqns=["head"])
    for n, k, fqn in product((16, 40, 1024, 2048, 4096, 8192), (16, 40, 1024, 2048, 4096, 8192), ("up", "lm_head")):
        linear = nn.Linear(k, n, bias=False, device="meta")
        assert ours(linear, fqn) == theirs(linear, fqn), (n, k, fqn)


def test_torchaos_objects_are_asked_for_attributes_not_classes() -> None:
    """So that a config of another torchao, or of one's own, is understood too."""
    config = Float8LinearConfig.from_recipe_name("rowwise")
    lookalike = SimpleNamespace(**{field.name: getattr(config, field.name) for field in fields(config)})
    assert recipe_from_config(lookalike) == Recipe.from_name("rowwise")
