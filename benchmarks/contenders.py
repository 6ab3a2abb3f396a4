"""Contenders: variants of a model (float8_compile/variants.py), made ready to be measured beside one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from float8_compile import calibrate
from float8_compile.delayed_step import scales_of
from float8_compile.torch_internals import with_own_code
from float8_compile.variants import CACHED, KEEP, TORCHAO, TORCHAO_RECIPES


def recipe_of(name: str) -> str:
    """What a contender's recipe is called, whoever's it is and whatever it does with its weights."""
    return name.removeprefix(TORCHAO).removesuffix(CACHED).removesuffix(KEEP)


def counterpart(name: str) -> str | None:
    """Torchao's of one of our variants: for `delayed`, which torchao has not, its dynamic scaling. Else None."""
    recipe = "tensorwise" if recipe_of(name) == "delayed" else recipe_of(name)
    return TORCHAO + recipe if recipe in TORCHAO_RECIPES and not name.startswith(TORCHAO) else None


def calibrated(model: nn.Module, step: Callable[[], object]) -> nn.Module:
    """The model, its delayed scales, if there are any, as after `step`, and shared where layers read the same tensor.

    Scales that fit what is cast: float8 numbers that are all zeros would be multiplied on less power, so faster.
    """
    if any(map(scales_of, model.modules())):
        with calibrate(model):
            step()
    return model


def compiled(call: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """A layer or function, in one graph, with a code of its own: Dynamo counts compilations by code, and of contenders
    that share one the ninth would be an error, and each call would ask the others' guards first."""

    def run(*args: Any) -> Any:
        return call(*args)

    compile: Any = torch.compile
    return compile(with_own_code(run), fullgraph=True, dynamic=False, backend=backend)
