"""A converter for torchtitan, under the name and with the options of its own `Float8LinearConverter`.

    model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="delayed", filter_fqns=["lm_head"])])

torchtitan (0.3) converts the tree of configs that a model is built from, so the float8 layers are there when it shards
and compiles. Which configs become float8 is decided by `convert_to_float8_training` on linears of the same shapes
that have no memory: filters, reasons and budgets are the usual ones. torchtitan is imported only where a config tree is
converted; what it asks of a converter is `Config.build()` and `convert()`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from float8_compile.convert import conversion_report, convert_to_float8_training
from float8_compile.delayed_step import give_scales
from float8_compile.filters import AutoFilter, auto_filter, missing_gpu_support
from float8_compile.linear import Float8Linear, become_float8
from float8_compile.recipe import Recipe

AUTO_FILTER = "auto_filter_small_kn"
_PLAIN = ("Linear", "ColumnParallelLinear", "RowParallelLinear")  # the last two after torchtitan 0.3


class Float8LinearConverter:
    """Turns every matching `Linear` of a torchtitan model into a `Float8Linear`. Made by `Config.build()`.

    Raises ValueError for a recipe that there is none of, or a GPU that has no float8 GEMM.
    """

    @dataclass(kw_only=True)
    class Config:
        """The options of torchtitan's `Float8LinearConverter.Config`, and whether casted weights are kept.

        recipe_name: one of `Recipe.names()`.
        filter_fqns: pieces of names to leave out. "auto_filter_small_kn" among them leaves out layers that would not
            gain (see `auto_filter`). Layers whose K or N is no multiple of 16 are left out in any case.
        emulate: multiply in float32, for GPUs that have no float8 GEMM. May be compiled.
        enable_fsdp_float8_all_gather: see `Recipe`; a weight that an embedding has too is gathered as it is.
        recompute_weight_cast, weight_cast_budget: see `convert_to_float8_training`.
        model_compile_enabled, precompute_float8_dynamic_scale_for_fsdp: accepted and needless. Layers that run
            eagerly on a GPU say so themselves, and scales of gathered weights are always computed in advance.
        """

        recipe_name: str = "rowwise"
        filter_fqns: list[str] = field(default_factory=list)
        emulate: bool = False
        enable_fsdp_float8_all_gather: bool = False
        recompute_weight_cast: bool | Literal["auto"] = True
        weight_cast_budget: int | None = None
        model_compile_enabled: bool = False
        precompute_float8_dynamic_scale_for_fsdp: bool = False

        def build(self) -> Float8LinearConverter:
            """The converter. Raises as it does."""
            return Float8LinearConverter(self)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recipe = replace(
            Recipe.from_name(config.recipe_name),
            emulate=config.emulate,
            fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        )
        # The model is built without memory, so no weight tells where it will be.
        if torch.cuda.is_available() and (missing := missing_gpu_support(torch.device("cuda"), self._recipe)):
            raise ValueError(f"Float8LinearConverter: {missing}. Emulate it in float32 with emulate=True")

    def convert(self, model: Any) -> Any:
        """Convert a model's config, before it is built, or a model itself (torchtitan up to 0.2); in place.

        Returns it, or where it is one `Linear` the config in its place. Raises ValueError where nothing is converted,
        with the layers that were left out and why.
        """
        if isinstance(model, nn.Module):
            return self._converted(model)

        from torchtitan.models.common import linear as titan  # type: ignore[import-not-found]

        found = list(model.traverse(titan.Linear.Config))
        linears = {fqn: _without_memory(config, titan) for fqn, config, _, _ in found}
        self._converted(_skeleton(linears))
        for fqn, config, parent, name in found:
            if not isinstance(linear := linears[fqn], Float8Linear):
                continue
            decided = {"_recipe": linear.recipe, "_recompute": linear.recompute_weight_cast, "_fqn": fqn}
            in_float8 = _float8_linear(type(config)._owner).Config(**_fields_of(config), **decided)
            if parent is None:
                return in_float8
            if isinstance(parent, list):
                parent[name] = in_float8
            else:
                setattr(parent, name, in_float8)
        root: Any = type(model)
        model.__class__ = _built_together(root, self._recipe.delayed_cast("input") is not None)
        return model

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: the layers see each step themselves. torchtitan up to 0.2 calls it."""

    def _converted(self, model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no layer was converted")  # is raised below
            convert_to_float8_training(
                model,
                config=self._recipe,
                module_filter_fn=self._filter(),
                recompute_weight_cast=self._config.recompute_weight_cast,
                weight_cast_budget=self._config.weight_cast_budget,
            )
        report = conversion_report(model)
        if all(row.recipe is None for row in report):
            reasons = [f"{row.fqn or '(root)'}: {row.reason}" for row in report[:10]] or ["there is no linear in it"]
            more = [f"and {len(report) - 10} more"] if len(report) > 10 else []
            raise ValueError("\n  ".join(["no layer was converted to float8", *reasons, *more]))
        return model

    def _filter(self) -> AutoFilter:
        names = [name for name in self._config.filter_fqns if name != AUTO_FILTER]
        if AUTO_FILTER in self._config.filter_fqns:
            return auto_filter(self._recipe, skip=names)
        return AutoFilter(None, tuple(names))


def _skeleton(linears: dict[str, nn.Linear]) -> nn.Module:
    """A model of nothing but these linears, under the names that they will have."""
    model = nn.Module()
    model._modules.update(linears)  # add_module takes no name with dots
    return model


def _without_memory(config: Any, titan: Any) -> nn.Linear:
    kind: Any = nn.Linear
    if type(config) not in [getattr(titan, name).Config for name in _PLAIN if hasattr(titan, name)]:
        # A subclass of that name, as its layer is one (LoRA's, one that is quantized), which no conversion takes.
        kind = type(type(config).__qualname__.split(".")[-2], (nn.Linear,), {})
    elif getattr(config, "num_linears", 1) > 1:
        kind = type("StackedLinear", (nn.Linear,), {})  # after 0.3: a parameter of three axes
    linear: nn.Linear = kind(config.in_features, config.out_features, config.bias, device="meta")
    return linear


def _fields_of(config: Any) -> dict[str, Any]:
    return {one.name: getattr(config, one.name) for one in fields(config)}


@cache
def _float8_linear(linear: Any) -> Any:
    """A linear of torchtitan's in float8, whose config is still one of `linear` to who shards or wraps it (LoRA)."""

    class TitanFloat8Linear(Float8Linear, linear):
        # With _, which a config leaves out where it is written as JSON.
        @dataclass(kw_only=True, slots=True)
        class Config(linear.Config):
            _recipe: Recipe
            _recompute: bool
            _fqn: str

        def __init__(self, config: Config) -> None:
            linear.__init__(self, config)
            become_float8([self], [config._recipe], [config._recompute], [config._fqn])

        # After 0.3 a parallel layer calls `_linear` with its own parameters, and what its ranks exchange is around it.
        forward: Any = linear.forward if hasattr(linear, "_linear") else Float8Linear.forward

        def _linear(self, input: Tensor, *_: Tensor | None) -> Tensor:
            return Float8Linear.forward(self, input)

    return TitanFloat8Linear


@cache
def _built_together(root: Any, is_delayed: bool) -> Any:
    """The config of a whole model, which does what no layer can see.

    Layers whose delayed scales move alike share their vectors; a weight that another module has too is gathered as it
    is, since that reads it in high precision; and what can't be run in parallel raises ValueError.
    """

    class Config(root):
        __slots__ = ()  # so that a config can become one

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            root.update_from_config(self, config=config, **kwargs)
            how = config.parallelism
            if is_delayed and how.pipeline_parallel_degree > 1:
                raise ValueError(
                    "Float8LinearConverter: amaxes of delayed scales are reduced over all ranks, of which a pipeline's "
                    "hold different layers: set pipeline_parallel_degree=1 or another recipe_name"
                )
            backend = getattr(how, "spmd_backend", "")
            if backend == "full_dtensor" or (backend == "partial_dtensor" and how.tensor_parallel_degree > 1):
                raise ValueError(
                    f"Float8LinearConverter: with spmd_backend={backend!r} layers get DTensors, which a Float8Linear "
                    "does not take: set spmd_backend='spmd_types'"
                )

        def build(self, **kwargs: Any) -> Any:
            model = root.build(self, **kwargs)
            layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
            holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
            for layer in layers:
                if holders[id(layer.weight)] > 1:
                    layer.recipe = replace(layer.recipe, fsdp_float8_all_gather=False)
            give_scales(layers, [Recipe.from_name("tensorwise")] * len(layers))  # lets go of each one's own
            give_scales(layers, [layer.recipe for layer in layers])
            return model

    Config.__qualname__ = root.__qualname__
    return Config
