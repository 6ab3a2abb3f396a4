"""The names under which users of torchao.float8 know these things, translated into recipes.

Defined here, not imported: importing torchao takes seconds, and its frozen configs are edited after birth (one
`CastConfig` shared by two operands silently gives e4m3 gradients). torchao's own objects are understood as well:
`recipe_from_config` asks for attributes and enum values, not for classes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from float8_compile.filters import AutoFilter, auto_filter, recipe_of
from float8_compile.recipe import E4M3, E5M2, HIGH_PRECISION, Cast, Gemm, Granularity, Recipe, Scaling


class ScalingType(enum.Enum):
    """Where a scale comes from: DYNAMIC, the tensor itself; DELAYED, the steps before; DISABLED, nowhere: high
    precision."""

    DYNAMIC = "dynamic"
    DELAYED = "delayed"
    DISABLED = "disabled"


class ScalingGranularity(enum.Enum):
    """What shares a scale: TENSORWISE, the whole tensor; AXISWISE, a row along the contracted axis."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


class Float8LinearRecipeName(enum.Enum):
    """The names of torchao's recipes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast; `target_dtype=None` is e4m3 for input and weight, e5m2 for gradients."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Float8GemmConfig:
    """Settings of one GEMM."""

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """torchao's configuration of a linear layer; checked when built, never edited.

    Raises ValueError for a combination that no recipe can express. `pad_inner_dim` is accepted and needless:
    odd shapes are always padded. `force_recompute_fp8_weight_in_bwd` is `recompute_weight_cast=True`, the
    default of `convert_to_float8_training`.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        recipe_from_config(self)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The configuration of one of torchao's recipes. Raises ValueError for another name."""
        known = [name.value for name in Float8LinearRecipeName]
        name = str(getattr(recipe_name, "value", recipe_name)).lower()
        if name not in known:
            raise ValueError(f"unknown recipe {recipe_name!r}: torchao's are {', '.join(known)}")
        if name == "tensorwise":
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=E4M3)
        rowwise = Float8LinearConfig(
            cast_config_input=row,
            cast_config_weight=row,
            cast_config_grad_output=row,
            round_scales_to_power_of_2=True,
        )
        if name == "rowwise":
            return rowwise
        high_precision = CastConfig(scaling_type=ScalingType.DISABLED)
        return replace(
            rowwise,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=E4M3),
            cast_config_input_for_grad_weight=high_precision,
            cast_config_grad_output_for_grad_weight=high_precision,
        )


def is_linear_config(config: object) -> bool:
    """Whether this is a `Float8LinearConfig`, ours or torchao's."""
    return all(hasattr(config, name) for name in ("cast_config_input", "cast_config_weight", "gemm_config_output"))


def recipe_from_config(config: Any) -> Recipe:
    """The `Recipe` that a `Float8LinearConfig` describes, ours or torchao's. Raises ValueError where none does."""
    power_of_two = config.round_scales_to_power_of_2

    def of(name: str, default: torch.dtype, override: str | None = None) -> Cast:
        chosen = getattr(config, override) if override else None
        return _cast(chosen or getattr(config, name), default, power_of_two)

    x, w = of("cast_config_input", E4M3), of("cast_config_weight", E4M3)
    g = of("cast_config_grad_output", E5M2)
    other_w = of("cast_config_weight", E4M3, "cast_config_weight_for_grad_input")
    other_x = of("cast_config_input", E4M3, "cast_config_input_for_grad_weight")
    other_g = of("cast_config_grad_output", E5M2, "cast_config_grad_output_for_grad_weight")
    recipe = Recipe(
        output=Gemm(x, w, config.gemm_config_output.use_fast_accum),
        grad_input=Gemm(g, other_w, config.gemm_config_grad_input.use_fast_accum),
        grad_weight=Gemm(other_g, other_x, config.gemm_config_grad_weight.use_fast_accum),
        emulate=config.emulate,
        fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
    )
    return _named(recipe)


# (N at most, K at most) of each rectangle of shapes that lost against bf16 in torchao's published measurements (H100,
# 16384 tokens, torchao/float8/README).
_ANY = 1 << 62
_LOSING_SHAPES = {
    "tensor": ((1024, 4096),),
    "row": ((2048, _ANY), (_ANY, 1024), (4096, 2048)),
}


@dataclass(frozen=True)
class MeasuredShapes:
    """Why torchao leaves a layer out, or None, by the granularity of the recipe's output GEMM."""

    granularity: str

    def __call__(self, linear: nn.Linear) -> str | None:
        """Of what is in one of the rectangles, its bounds."""
        n, k = linear.weight.shape
        for most_n, most_k in _LOSING_SHAPES[self.granularity]:
            if n <= most_n and k <= most_k:
                bounds = [f"{axis} <= {most}" for axis, most in (("N", most_n), ("K", most_k)) if most != _ANY]
                return f"too small to gain ({' and '.join(bounds)}: casts cost more than the GEMM saves)"
        return None


def auto_filter_for_recipe(recipe: Any, filter_fqns: Sequence[str]) -> AutoFilter:
    """torchao's `_auto_filter_for_recipe`, with its thresholds; `auto_filter` estimates by device and recipe."""
    skip = auto_filter(recipe, skip=filter_fqns).skip  # which refuses one string
    return AutoFilter(MeasuredShapes(recipe_of(recipe).output.left.granularity), skip)


_GRANULARITY: dict[str, Granularity] = {
    ScalingGranularity.TENSORWISE.value: "tensor",
    ScalingGranularity.AXISWISE.value: "row",
}


def _cast(config: Any, default: torch.dtype, power_of_two: bool) -> Cast:
    scaling = config.scaling_type.value
    if scaling == ScalingType.DISABLED.value:
        return HIGH_PRECISION
    if scaling not in get_args(Scaling):
        raise ValueError(f"{config.scaling_type}: float8_compile knows DYNAMIC, DELAYED and DISABLED")
    granularity = _GRANULARITY.get(config.scaling_granularity.value)
    if granularity is None:
        raise ValueError(f"{config.scaling_granularity}: float8_compile knows TENSORWISE and AXISWISE")
    return Cast(config.target_dtype or default, scaling, granularity=granularity, power_of_two=power_of_two)


def _named(recipe: Recipe) -> Recipe:
    """The recipe under its preset's name, if it is one, so that reports say it."""
    for name in Recipe.names():
        named, gathered = replace(recipe, name=name), recipe.fsdp_float8_all_gather
        if replace(Recipe.from_name(name), emulate=recipe.emulate, fsdp_float8_all_gather=gathered) == named:
            return named
    return recipe
