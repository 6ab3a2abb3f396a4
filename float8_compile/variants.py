"""A model in its variants: as it was built, in one of our recipes, in one of torchao's.

bf16                as built, in whatever dtype that is
delayed             converted with one of our recipes, casting weights again in backward; delayed scales as after
                    some steps
delayed+keep        the same, keeping the casted weights (recompute_weight_cast=False)
delayed+cached      the same with weights cast once per optimizer step (cache_weight_casts); also delayed+keep+cached
torchao:tensorwise  converted by torchao
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from float8_compile.calibration import mark_calibrated
from float8_compile.convert import convert_to_float8_training
from float8_compile.delayed_step import scales_of
from float8_compile.recipe import Recipe
from float8_compile.weight_cache import cache_weight_casts

Build = Callable[[], Any]

AS_BUILT = "bf16"
KEEP, CACHED = "+keep", "+cached"
TORCHAO = "torchao:"
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def names() -> tuple[str, ...]:
    """Of all variants, without those that keep weights."""
    return (AS_BUILT, *(TORCHAO + recipe for recipe in TORCHAO_RECIPES), *Recipe.names())


def check(name: str) -> str:
    """The name, if it is one of a variant. Raises ValueError that lists them."""
    base = _base(name)
    if base not in names() or (base != name and base not in Recipe.names()):
        raise ValueError(
            f"unknown recipe {name!r}: there is {', '.join(names())}; {KEEP!r} behind one of ours keeps its casted "
            f"weights for backward, and {CACHED!r} behind that casts them once per optimizer step"
        )
    return name


def variant(build: Build, name: str) -> Build:
    """`build`, with its model converted. The returned function raises TypeError where `build` doesn't return
    (model, args) or (model, args, kwargs).

    Raises ValueError for an unknown name, ModuleNotFoundError where torchao is asked for and not installed.
    """
    convert = _converter(check(name))

    def build_variant() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model, args, kwargs = model_and_arguments(build())
        return convert(model), args, kwargs

    return build_variant


def model_and_arguments(built: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What a build function returned, complete. Raises TypeError where it is something else."""
    expected = "expected (model, args), with an nn.Module and a tuple of its arguments, or (model, args, kwargs)"
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise TypeError(f"build() returned {_described(built)}: {expected}")
    model, args, kwargs = (*built, {})[:3]
    if not isinstance(model, nn.Module):
        raise TypeError(f"build() returned {_described(model)} for a model: {expected}")
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise TypeError(f"build() returned {_described(args)} and {_described(kwargs)} for arguments: {expected}")
    return model, tuple(args), kwargs


def load(spec: str) -> Build:
    """The function that "package.module:function" names.

    Raises ValueError for another form, ModuleNotFoundError or AttributeError that says what is missing, TypeError where
    it can't be called. What the module raises while it is imported comes through.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"{spec!r}: expected package.module:function, such as my_project.models:build")
    if "/" in module_name or module_name.endswith(".py"):
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"{module_name!r} is a file: name the module, {meant}:{function_name}")
    if not _exists(module_name):
        raise ModuleNotFoundError(
            f"there is no module {module_name!r}: run this where `python -c 'import {module_name}'` works",
            name=module_name,
        )
    module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        raise AttributeError(f"module {module_name!r} has no {function_name!r}: it has {_functions(module)}")
    if not callable(function) or isinstance(function, nn.Module):
        raise TypeError(
            f"{spec} is {_described(function)}: expected a function without arguments that returns (model, args)"
        )
    return function


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch and torchao log about themselves while they are imported and trace."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _base(name: str) -> str:
    return name.removesuffix(CACHED).removesuffix(KEEP)


def _converter(name: str) -> Callable[[nn.Module], nn.Module]:
    if name == AS_BUILT:
        return lambda model: model
    if name.startswith(TORCHAO):
        return _torchao_converter(name.removeprefix(TORCHAO))
    recipe, keep = Recipe.from_name(_base(name)), KEEP in name

    def convert(model: nn.Module) -> nn.Module:
        convert_to_float8_training(model, config=recipe, recompute_weight_cast=not keep)
        if any(map(scales_of, model.modules())):
            mark_calibrated(model)
        if name.endswith(CACHED):
            cache_weight_casts(model)
        return model

    return convert


def _torchao_converter(recipe: str) -> Callable[[nn.Module], nn.Module]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{TORCHAO}{recipe} needs torchao: pip install torchao", name=error.name) from None
    config = Float8LinearConfig.from_recipe_name(recipe)
    return lambda model: convert_to_float8_training(model, config=config)  # another object where that is one linear


def _exists(module: str) -> bool:
    """Whether it can be found; its parents are imported for that, and what they raise comes through."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return False
        raise


def _functions(module: Any) -> str:
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    return ", ".join(name for name in own if callable(getattr(module, name)) and name[0] != "_") or "no function"


def _described(thing: Any) -> str:
    if isinstance(thing, tuple):
        return f"a tuple of {len(thing)}"
    return "None" if thing is None else f"a {type(thing).__name__}"
