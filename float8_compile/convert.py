"""Conversion: plan, check, apply, report, undo.

The plan is made first, and with it every question is asked that could fail (filters, recipes, devices); only then
are modules changed, by giving each chosen `nn.Linear` the class `Float8Linear`. So hooks, parameters, ties, flags
and references stay what they were, and a conversion that raises leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import nn

from float8_compile.attention import (
    OWN_PRODUCT,
    READS_WEIGHT,
    packed_projections,
    read_without_a_call,
    settle_fast_paths,
)
from float8_compile.compat import is_linear_config, recipe_from_config
from float8_compile.filters import is_fully_sharded, missing_gpu_support, obstacle
from float8_compile.linear import Float8Linear, become_float8
from float8_compile.recipe import Recipe
from float8_compile.recompute import weights_to_keep
from float8_compile.table import text_table

Filter = Callable[[nn.Linear, str], bool]

_REASON = "float8_reason"  # attribute of a layer: why conversion left it out, or what its filter expects of it


@dataclass(frozen=True)
class ConversionRow:
    """One linear layer: its name, in_features K, out_features N, its recipe or the reason it has none.

    reason: of a layer with a recipe, what the filter expects of it, where the filter says.

    Or a weight that `nn.MultiheadAttention` multiplies by without a layer, under the parameter's name.
    """

    fqn: str
    k: int
    n: int
    recipe: Recipe | None
    reason: str = ""


class ConversionReport(list[ConversionRow]):
    """The rows in the model's order; `str` gives a table.

    share: of the model's parameters, those that are weights of layers in float8. What multiplies by a parameter without
    a linear layer (experts in one tensor, GPT-2's Conv1D) has no row, and shows here.
    """

    share = 0.0

    def __str__(self) -> str:
        rows = [(row.fqn or "(root)", row.k, row.n, _outcome(row)) for row in self]
        converted = sum(row.recipe is not None for row in self)
        table = text_table(("layer", "K", "N", "recipe, or why not"), rows)
        share = f"their weights are {self.share:.0%} of the model's parameters"
        return f"{table}\n{converted} of {len(self)} linear layers run in float8; {share}"


def _outcome(row: ConversionRow) -> str:
    if row.recipe is None:
        return f"- {row.reason}"
    return f"{row.recipe}, {row.reason}" if row.reason else str(row.recipe)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Any = "tensorwise",
    module_filter_fn: Filter | None = None,
    recompute_weight_cast: bool | Filter | Literal["auto"] = True,
    weight_cast_budget: int | None = None,
) -> nn.Module:
    """Turn every matching `nn.Linear` into a `Float8Linear`, in place, and return `module`.

    config: a `Recipe`; a recipe's name in any case, or torchao's enum of it; a `Float8LinearConfig` (torchao's,
        or ours); or a callable `(linear, fqn) -> any of these, or None` to leave the layer as it is.
    module_filter_fn: `(linear, fqn) -> bool`, whether to convert. Names are without `_orig_mod.`, `module.` and
        what other wrappers add.
    recompute_weight_cast: a bool, or a callable `(linear, fqn) -> bool`; see `Float8Linear`. Or "auto": keeps the
        casted weights that gain most within `weight_cast_budget` bytes and recomputes the others (recompute.py).

    Layers that can't be converted (subclasses, weights of other dtypes) are skipped and named, with the reason, in
    `conversion_report`. Warns where nothing is converted or where a name in a filter's `skip` matches nothing.

    Raises TypeError or ValueError for a config that is none, RuntimeError for a weight on a GPU that has no
    float8 GEMM; the model is then unchanged.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_to_float8_training needs an nn.Module, got {type(module).__name__}")
    recipe_of = _recipe_chooser(config)
    never_called = read_without_a_call(module)
    plan = [
        _planned(linear, fqn, recipe_of, module_filter_fn, READS_WEIGHT if linear in never_called else "")
        for fqn, linear in named_linears(module)
    ]
    linears = dict(named_linears(module))
    plan = _without_gathers_of_shared_weights(module, plan, linears)
    chosen = {row.fqn: (linears[row.fqn], row.recipe) for row in plan if row.recipe is not None}
    recompute = _decide_recompute(recompute_weight_cast, weight_cast_budget, chosen)
    _warn_about(plan, module_filter_fn)
    for row in plan:
        linear = linears[row.fqn]
        if row.reason:
            setattr(linear, _REASON, row.reason)
        else:
            vars(linear).pop(_REASON, None)
    become_float8(
        [linear for linear, _ in chosen.values()],
        [recipe for _, recipe in chosen.values()],
        [recompute[fqn] for fqn in chosen],
        list(chosen),
    )
    settle_fast_paths(module)
    return module


def convert_from_float8_training(module: nn.Module) -> nn.Module:
    """The way back, in place: every `Float8Linear` is a plain `nn.Linear` again, the same object."""
    linears = list(named_linears(module))
    for fqn, linear in linears:
        if isinstance(linear, Float8Linear) and type(linear) is not Float8Linear:
            raise TypeError(
                f"layer {fqn!r} is a {type(linear).__name__}, a subclass of Float8Linear, and would lose what that "
                "adds: convert back before fully_shard, or take the layer out of the model"
            )
        if isinstance(linear, Float8Linear) and linear.split is not None:
            raise TypeError(f"layer {fqn!r} is split over ranks (tensor parallelism): convert back before that")
        if isinstance(linear, Float8Linear) and linear.gather is not None and linear.gather.is_sharded:
            raise TypeError(f"layer {fqn!r}: FSDP2 gathers its weight in float8: convert back before fully_shard")
    for _, linear in linears:
        vars(linear).pop(_REASON, None)
        if isinstance(linear, Float8Linear):
            linear.become_plain()
    settle_fast_paths(module)
    return module


def conversion_report(module: nn.Module) -> ConversionReport:
    """Every linear layer of the model with its recipe, or with the reason that conversion left it out.

    And the projections that `nn.MultiheadAttention` multiplies by itself, which no conversion takes.
    """
    never_called, report, in_float8 = read_without_a_call(module), ConversionReport(), dict[int, int]()
    for fqn, part in _named_modules(module):
        for name, weight in packed_projections(part):
            n, k = weight.shape
            report.append(ConversionRow(f"{fqn}.{name}" if fqn else name, k, n, None, OWN_PRODUCT))
        if isinstance(part, nn.Linear):
            recipe = part.recipe if isinstance(part, Float8Linear) and part not in never_called else None
            reason = (
                READS_WEIGHT if part in never_called else vars(part).get(_REASON, "" if recipe else "never converted")
            )
            report.append(ConversionRow(fqn, part.in_features, part.out_features, recipe, reason))
            if recipe is not None:
                in_float8[id(part.weight)] = part.weight.numel()
    known = sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))
    report.share = sum(in_float8.values()) / max(1, known)
    return report


@contextlib.contextmanager
def float8_disabled(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, the layers run in high precision, as the `nn.Linear`s they were; afterwards as before."""
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    before = [layer.enabled for layer in layers]
    try:
        for layer in layers:
            layer.enabled = False
        yield module
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.enabled = enabled


def _planned(
    linear: nn.Linear, fqn: str, recipe_of: Callable[[nn.Linear, str], Recipe | None], keep: Filter | None, why_not: str
) -> ConversionRow:
    def row(recipe: Recipe | None, reason: str = "") -> ConversionRow:
        return ConversionRow(fqn, linear.in_features, linear.out_features, recipe, reason)

    if reason := why_not or obstacle(linear):
        return row(None, reason)
    if keep is not None and not keep(linear, fqn):
        explain = getattr(keep, "reason", None)
        return row(None, (explain and explain(linear, fqn)) or "left out by module_filter_fn")
    recipe = recipe_of(linear, fqn)
    if recipe is None:
        return row(None, "left out by config")
    if missing := missing_gpu_support(linear.weight.device, recipe):
        raise RuntimeError(
            f"layer {fqn!r} is on {linear.weight.device}: {missing}. Emulate it in float32 with "
            "config=dataclasses.replace(Recipe.from_name(...), emulate=True), or leave it out with module_filter_fn"
        )
    expect = getattr(keep, "expectation", None)
    return row(recipe, expect(linear, fqn) if expect else "")


def _without_gathers_of_shared_weights(
    module: nn.Module, plan: list[ConversionRow], linears: dict[str, nn.Linear]
) -> list[ConversionRow]:
    """The plan, with float8 all-gathers only of weights that all who hold them multiply in the same float8.

    A tied embedding looks its rows up in high precision, and a weight is gathered once.
    """
    for row in plan:
        gather = getattr(linears[row.fqn], "gather", None)
        asked = row.recipe.output.right if row.recipe is not None and row.recipe.fsdp_float8_all_gather else None
        if gather is not None and gather.is_sharded and row.recipe is not None and gather.cast != asked:
            raise ValueError(
                f"layer {row.fqn!r}: FSDP2 gathers its weight as {gather.cast}, which can't change after fully_shard: "
                "convert with a recipe that gathers it alike"
            )
    if not any(row.recipe is not None and row.recipe.fsdp_float8_all_gather for row in plan):
        return plan
    casts = {
        linears[row.fqn]: row.recipe.output.right if row.recipe.fsdp_float8_all_gather else None
        for row in plan
        if row.recipe is not None
    }
    wanted: dict[int, set[Any]] = {}
    for holder in module.modules():
        for parameter in vars(holder)["_parameters"].values():
            wanted.setdefault(id(parameter), set()).add(casts.get(holder))  # type: ignore[call-overload]
    sharded = {m for root in module.modules() if is_fully_sharded(root) for m in root.modules()}

    def settled(row: ConversionRow) -> ConversionRow:
        linear = linears[row.fqn]
        if row.recipe is None or not row.recipe.fsdp_float8_all_gather:
            return row
        if len(wanted[id(linear.weight)]) > 1:
            return replace(row, recipe=replace(row.recipe, fsdp_float8_all_gather=False))
        if linear in sharded and getattr(linear, "gather", None) is None:
            raise ValueError(
                f"layer {row.fqn!r} is sharded already, and FSDP2 asks for a float8 all-gather when it shards: convert "
                "before fully_shard, or set fsdp_float8_all_gather=False"
            )
        return row

    return [settled(row) for row in plan]


def _recipe_chooser(config: Any) -> Callable[[nn.Linear, str], Recipe | None]:
    if callable(config) and not isinstance(config, type):
        return lambda linear, fqn: _chosen(config, linear, fqn)
    recipe = _as_recipe("tensorwise" if config is None else config)
    return lambda linear, fqn: recipe


def _chosen(choose: Callable[[nn.Linear, str], Any], linear: nn.Linear, fqn: str) -> Recipe | None:
    if (chosen := choose(linear, fqn)) is None:
        return None
    try:
        return _as_recipe(chosen)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {fqn!r}: {error}") from None


def _as_recipe(config: Any) -> Recipe:
    if isinstance(config, Recipe):
        return config
    if is_linear_config(config) and not isinstance(config, type):
        return recipe_from_config(config)
    if isinstance(config, enum.Enum):
        config = config.value
    if isinstance(config, str):
        return Recipe.from_name(config)
    raise TypeError(
        f"config={config!r}: expected a Recipe, one of the names {', '.join(Recipe.names())}, a Float8LinearConfig, "
        "or a callable (linear, fqn) that returns one of these or None"
    )


def _decide_recompute(
    choice: bool | Filter | Literal["auto"], budget: int | None, chosen: dict[str, tuple[nn.Linear, Recipe]]
) -> dict[str, bool]:
    if (choice == "auto") != (budget is not None):
        raise ValueError(
            f"recompute_weight_cast={choice!r} with weight_cast_budget={budget!r}: "
            'a budget in bytes goes with recompute_weight_cast="auto", and only with it'
        )
    if budget is not None:
        kept = weights_to_keep({fqn: (linear.weight, recipe) for fqn, (linear, recipe) in chosen.items()}, budget)
        return {fqn: fqn not in kept for fqn in chosen}
    decided = {fqn: choice(linear, fqn) if callable(choice) else choice for fqn, (linear, _) in chosen.items()}
    for fqn, value in decided.items():
        if not isinstance(value, bool):
            raise TypeError(f"recompute_weight_cast is {value!r} for layer {fqn!r}: expected True or False")
    return cast(dict[str, bool], decided)


def _warn_about(plan: list[ConversionRow], keep: Filter | None) -> None:
    unused = getattr(keep, "unused", None)
    for piece in unused([row.fqn for row in plan]) if unused else ():
        warnings.warn(f"skip={piece!r} matches no linear layer: a typing error?", stacklevel=3)
    if all(row.recipe is None for row in plan):
        reasons = [f"{row.fqn or '(root)'}: {row.reason}" for row in plan[:10]] or ["there is no nn.Linear in it"]
        warnings.warn("\n  ".join(["no layer was converted to float8", *reasons]), stacklevel=3)


# What wrappers put into names: torch.compile, FSDP1, activation checkpointing; DDP and DataParallel say "module",
# which is also a name that people use, so those go by the parent's class.
WRAPPER_NAMES = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def named_linears(root: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear once, with its name as the user knows it."""
    return ((fqn, module) for fqn, module in _named_modules(root) if isinstance(module, nn.Linear))


def _named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield prefix, module
        for name, child in module.named_children():
            wraps = name in WRAPPER_NAMES or (name == "module" and isinstance(module, _MODULE_WRAPPERS))
            yield from walk(child, prefix if wraps else f"{prefix}.{name}" if prefix else name)

    yield from walk(root, "")
