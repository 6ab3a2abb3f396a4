"""Which linear layers can run in float8, which would gain from it, and the reason in words.

A filter is any callable `(linear, fqn) -> bool`, as in torchao. One that also has `reason(linear, fqn)` tells the
conversion report why a layer is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from float8_compile.attention import READS_WEIGHT
from float8_compile.linear import HIGH_PRECISION_DTYPES, Float8Linear
from float8_compile.recipe import Recipe


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


# Shapes that lost against bf16 in torchao's published measurements (H100, 16384 tokens, torchao/float8/README):
# (N at most, K at most) of each rectangle of losing shapes.
_ANY = 1 << 62
_LOSING_SHAPES = {
    "tensor": [(1024, 4096)],
    "row": [(2048, _ANY), (_ANY, 1024), (4096, 2048)],
}
_MEASURED_DEVICES = ("H100", "H200")  # the same tensor cores; other GPUs: nobody has measured


@dataclass(frozen=True)
class AutoFilter:
    """Leaves out layers that would not gain; made by `auto_filter`.

    granularity: of the recipe's output GEMM, which the measured table goes by. None: only GEMMs that would be padded
        are left out, however small or large.
    skip: pieces of names to leave out in any case.
    """

    granularity: str | None
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
        for most_n, most_k in () if self.granularity is None else _LOSING_SHAPES[self.granularity]:
            if n <= most_n and k <= most_k:
                bounds = [f"{axis} <= {most}" for axis, most in (("N", most_n), ("K", most_k)) if most != _ANY]
                return f"too small to gain ({' and '.join(bounds)}: casts cost more than the GEMM saves)"
        return None

    def unused(self, fqns: Sequence[str]) -> tuple[str, ...]:
        """Pieces of `skip` that none of the names contains: most likely typing errors."""
        return tuple(piece for piece in self.skip if not any(piece in fqn for fqn in fqns))


def auto_filter(recipe: Any, *, skip: Sequence[str] = (), device: str = "H100") -> AutoFilter:
    """A filter that leaves out layers which would not gain, with the reason in the report.

    recipe: a `Recipe`, or a recipe's name or torchao enum. skip: pieces of names (fqn) to leave out as well.
    device: the GPU it is for. Raises ValueError for one that nobody has measured, and TypeError for a `skip`
    that is one string (it would be taken letter by letter).
    """
    if isinstance(skip, str):
        raise TypeError(f"auto_filter(skip={skip!r}): expected a list of names, such as [{skip!r}]")
    if device not in _MEASURED_DEVICES:
        raise ValueError(
            f"auto_filter(device={device!r}): measured are {', '.join(_MEASURED_DEVICES)}; "
            "for others write a module_filter_fn from your own measurements"
        )
    if not isinstance(recipe, Recipe):
        recipe = Recipe.from_name(str(getattr(recipe, "value", recipe)))
    return AutoFilter(recipe.output.left.granularity, tuple(skip))
