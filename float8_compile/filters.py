"""Which linear layers can run in float8, which would gain from it, and the reason in words.

A filter is any callable `(linear, fqn) -> bool`, as in torchao. One that also has `reason(linear, fqn)` tells the
conversion report why a layer is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from float8_compile.attention import READS_WEIGHT
from float8_compile.linear import HIGH_PRECISION_DTYPES, Float8Linear
from float8_compile.recipe import Recipe
from float8_compile.roofline import bf16_step, float8_step
from float8_compile.targets import TARGETS, Target


def obstacle(linear: nn.Linear) -> str | None:
    """Why this layer can't become a `Float8Linear` without losing something, or None."""
    if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return READS_WEIGHT
    if isinstance(linear, nn.LazyLinear):
        return "LazyLinear has no weight yet: run one batch, then convert"
    if is_fully_sharded(linear):
        return "it is sharded already: convert before fully_shard"
    if type(linear) not in (nn.Linear, Float8Linear):
        name = type(linear).__name__
        if name == Float8Linear.__name__:  # torchao has one of that name
            name = _with_package(type(linear))
        return f"{name} is a subclass of nn.Linear with a behaviour of its own"
    if "forward" in vars(linear):
        return "its forward was replaced on the instance"
    # Quantized already, for one. A DTensor is a wrapper too, but of a plain tensor's kind.
    if hasattr(linear.weight, "__tensor_flatten__") and not hasattr(linear.weight, "placements"):
        return f"its weight is {_with_package(type(linear.weight))}, not a plain tensor"
    if linear.weight.dtype not in HIGH_PRECISION_DTYPES:
        return f"its weight is {linear.weight.dtype}, not bfloat16, float16 or float32"
    return None


def _with_package(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called on this module. By name, since the class is a late import."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def missing_gpu_support(device: torch.device, recipe: Recipe) -> str | None:
    """Why this device can't run the recipe, or None."""
    if device.type != "cuda" or recipe.emulate or not recipe.is_float8 or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 9):
        return None
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return f"{name} (compute capability {version}) has no float8 GEMM, which needs 8.9 or newer"


@dataclass(frozen=True)
class Estimate:
    """By a roofline of one GPU (roofline.py) how much faster a layer's step is in float8.

    tokens: of the layer's input in one call (M).
    """

    recipe: Recipe
    target: Target
    tokens: int

    def gain(self, linear: nn.Linear) -> float:
        """Seconds in bfloat16 over seconds in float8, casts counted."""
        n, k = linear.weight.shape
        in_float8 = float8_step(self.tokens, k, n, self.target, self.recipe)
        return bf16_step(self.tokens, k, n, self.target).seconds / in_float8.seconds

    def __call__(self, linear: nn.Linear) -> str | None:
        """Why the layer is better left in high precision, or None."""
        gain = self.gain(linear)
        return None if gain >= LEAST_GAIN else f"too little to gain: {self.words(gain)}"

    def words(self, gain: float) -> str:
        """The estimate and what it is for."""
        return f"x {gain:.2f} by roofline ({self.target.name}, {self.tokens} tokens)"


LEAST_GAIN = 1.1  # what the estimate leaves out (tiles, clocks, neighbours' fusions) is about as much


@dataclass(frozen=True)
class AutoFilter:
    """Leaves out layers that would not gain; made by `auto_filter`.

    loses: why a layer would not, or None; itself None: only GEMMs that would be padded are left out.
    skip: pieces of names to leave out in any case.
    """

    loses: Callable[[nn.Linear], str | None] | None
    skip: tuple[str, ...]

    def __call__(self, linear: nn.Module, fqn: str) -> bool:
        return isinstance(linear, nn.Linear) and self.reason(linear, fqn) is None

    def reason(self, linear: nn.Linear, fqn: str) -> str | None:
        """Why the layer is left out, or None."""
        for piece in self.skip:
            if piece in fqn:
                return f"skipped by name ({piece!r})"
        n, k = linear.weight.shape
        if n % 16 or k % 16:
            return f"K={k}, N={n}: not multiples of 16, so each GEMM would be padded"
        return self.loses(linear) if self.loses is not None else None

    def expectation(self, linear: nn.Linear, fqn: str) -> str:
        """Of a layer that is not left out, what is expected of it, or nothing."""
        return self.loses.words(self.loses.gain(linear)) if isinstance(self.loses, Estimate) else ""

    def unused(self, fqns: Sequence[str]) -> tuple[str, ...]:
        """Pieces of `skip` that none of the names contains: most likely typing errors."""
        return tuple(piece for piece in self.skip if not any(piece in fqn for fqn in fqns))


def auto_filter(recipe: Any, *, skip: Sequence[str] = (), device: Any = "H100", tokens: int = 8192) -> AutoFilter:
    """A filter that leaves out layers which would not gain by a tenth, with the estimate in the report.

    recipe: a `Recipe`, or a recipe's name or torchao enum. skip: pieces of names (fqn) to leave out as well.
    device: the GPU it is for, by name (H100, H200, B200, L40S); or "cuda" or a torch.device, for this machine's own.
    tokens: how many a layer gets in one call (batch times sequence).

    Raises ValueError for a GPU whose peaks nobody has entered or fewer than 1 token, TypeError for a `skip` that is one
    string (it would be taken letter by letter).
    """
    if isinstance(skip, str):
        raise TypeError(f"auto_filter(skip={skip!r}): expected a list of names, such as [{skip!r}]")
    if tokens < 1:
        raise ValueError(f"auto_filter(tokens={tokens}): expected 1 or more")
    return AutoFilter(Estimate(recipe_of(recipe), _target(device), tokens), tuple(skip))


def recipe_of(recipe: Any) -> Recipe:
    """A `Recipe`, also from its name or from torchao's enum of it."""
    return recipe if isinstance(recipe, Recipe) else Recipe.from_name(str(getattr(recipe, "value", recipe)))


def _target(device: Any) -> Target:
    if isinstance(device, str) and device.upper() in TARGETS:
        return TARGETS[device.upper()]
    try:
        here = torch.device(device)
    except (RuntimeError, TypeError):
        here = None
    known = ", ".join(TARGETS)
    if here is None or here.type != "cuda":
        raise ValueError(f"auto_filter(device={device!r}): expected one of {known}, or 'cuda' for this machine's GPU")
    name = torch.cuda.get_device_name(here) if torch.cuda.is_available() else "none"
    found = [target for key, target in TARGETS.items() if key in name.split()]
    if not found:
        raise ValueError(
            f"auto_filter(device={device!r}): this machine's GPU is {name}, and only {known} are known: name the one "
            "that is nearest to it, or write a module_filter_fn from your own measurements"
        )
    return found[0]
