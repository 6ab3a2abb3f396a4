"""Delayed scales, a cached and a gathered weight as parts of their layer: made, moved, copied and loaded with it.

In a checkpoint they go by the names that float8_experimental gave them: `fp8_amax_input`, `fp8_amax_history_input`,
`fp8_scale_input`, the same for `grad_output`, and `fp8_scale_weight`: plain float32 tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.cached_weight import CachedWeight
from float8_compile.cast import scale_from_amax, tensor_amax
from float8_compile.delayed import ROLES, DelayedScale
from float8_compile.delayed_step import adopt, give_scales, scales_of, watch
from float8_compile.gathered_weight import bind, gather_of, release
from float8_compile.recipe import Recipe
from float8_compile.split import Split
from float8_compile.weight_gather import Model, WeightGather

PREFIX = "fp8_"
STATE_KEYS = frozenset(f"{PREFIX}{name}_{role}" for name in ("amax", "amax_history", "scale") for role in ROLES)


class ScaledLinear(nn.Linear):
    """An `nn.Linear` with a recipe, and with a `DelayedScale` for each role that the recipe delays, else None.

    cached_weight: the weight's cast, where `cache_weight_casts` made one. It is no state: no copy and no file has it.
    gather: how FSDP2 gathers the weight in float8, where the recipe wants it.
    split: how tensor parallelism has split the weight, where it has.
    """

    input_scale: DelayedScale | None
    grad_output_scale: DelayedScale | None
    weight_scale: DelayedScale | None
    cached_weight: CachedWeight | None
    gather: WeightGather | None
    split: Split | None
    _recipe: Recipe

    @property
    def recipe(self) -> Recipe:
        """How each operand is cast. Another one may be set at any time; delayed scales then start afresh, unless it
        delays the same casts in the same way."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        self.have_gathered(recipe)
        give_scales([self], [recipe])
        self._recipe = recipe
        if self.cached_weight is not None:
            self.cached_weight.fit(recipe)

    def hold(self, cast: CachedWeight | None) -> None:
        """Have this cast of the weight from here on, or none."""
        if self.cached_weight is not None:
            self.cached_weight.release()
        self.cached_weight = cast

    def have_gathered(self, recipe: Recipe, model: Model | None = None) -> None:
        """Have FSDP2 gather the weight as this recipe wants; RuntimeError where it has the weight already otherwise.

        model: the same object for layers whose weights are measured together; None: this one alone.
        """
        cast = recipe.output.right if recipe.fsdp_float8_all_gather else None
        if self.gather is not None and self.gather.cast != cast:
            release(self.gather, self)
            self.gather = None
        if self.gather is None and cast is not None:
            self.gather = gather_of(self, cast, model or Model())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; what tensor parallelism or a user puts in the weight's place is gathered as that was."""
        super().register_parameter(name, param)
        if name == "weight" and vars(self).get("gather") is not None:
            bind(vars(self)["gather"], self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to()`, `.bfloat16()`, `to_empty` and so on: scales follow the weight's device, and stay float32."""
        before, other_numbers = list(self.parameters()), False

        def noting(tensor: Tensor) -> Tensor:
            nonlocal other_numbers
            result = fn(tensor)
            other_numbers |= result is not tensor
            return result

        super()._apply(noting, recurse)
        self._follow(before)
        if other_numbers and self.weight_scale is not None:
            self.weight_scale.forget()  # rounded, or not initialised yet
        return self

    def _follow(self, before: list[nn.Parameter]) -> None:
        """Bring scales and cached weight to where the weight is; watch parameters in the place of those before."""
        scales = scales_of(self)
        for scale in scales.values():
            scale.place(self.weight.device)
        if self.cached_weight is not None:
            self.cached_weight.bind(self.weight)  # type: ignore[arg-type]
        if self.gather is not None:
            bind(self.gather, self)
        if scales:
            adopt(self)
            if any(now is not was for now, was in zip(self.parameters(), before, strict=False)):
                watch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As without this method; but torch's parametrizations add one to classes that have none, which leaves out
        `__setstate__`."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(ScaledLinear.__getstate__(self), memo))  # parametrizations raise in theirs
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cached_weight": None, "gather": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.have_gathered(self._recipe)
        if scales_of(self):
            adopt(self)
            watch(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Copies: safetensors takes no tensor that several layers share, and who averages state dicts in place (timm's
        EMA) would write a scale without its reciprocal."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for role, scale in scales_of(self).items():
            for name, tensor in scale.tensors().items():
                destination[f"{prefix}{PREFIX}{name}_{role}"] = tensor.clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Whatever the checkpoint has of delayed scales is taken.

        What it lacks starts afresh where it has the layer's weight (a plain checkpoint), and stays where it has not: it
        is of other layers, or of scales only.
        """
        before, arguments = list(self.parameters()), (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        unexpected_keys[:] = [key for key in unexpected_keys if key.removeprefix(prefix) not in STATE_KEYS]
        self._follow(before)
        with torch.no_grad():
            error_msgs += self._load_scales(state_dict, prefix)

    def _load_scales(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Returns the errors, as `_load` does."""
        errors: list[str] = []
        has_weight = any("weight" in name and prefix + name in state_dict for name in self._names_of_tensors())
        for role, scale in scales_of(self).items():
            keys = {name: f"{prefix}{PREFIX}{name}_{role}" for name in scale.tensors()}
            saved = {name: state_dict[key] for name, key in keys.items() if key in state_dict}
            if saved or has_weight:
                errors += _load(scale, saved, keys)
        # Also where it has nothing of this layer: a tied weight comes under another one's name.
        known = self.weight_scale is not None and not self.weight.is_meta and bool(self.weight_scale.scale > 0)
        if prefix + "weight" in state_dict or (known and not has_weight):
            self.measure_weight()
        return errors

    def _names_of_tensors(self) -> Iterator[str]:
        """Of parameters and buffers, also of what pruning or a parametrization computes the weight from."""
        return (name for name, _ in itertools.chain(self.named_parameters(), self.named_buffers()))

    @torch.no_grad()
    def measure_weight(self) -> None:
        """The weight's scale from the weight, where that is whole and there; a sharded one has the checkpoint's."""
        how = self.recipe.delayed_cast("weight")
        if how is None or how.dtype is None or self.weight_scale is None:
            return
        if not self.weight.is_meta and not hasattr(self.weight, "to_local"):
            amax = tensor_amax(self.weight)
            scale = torch.where(amax > 0, scale_from_amax(amax, how.dtype, how.power_of_two), 0.0)
            self.weight_scale.set_scale(scale, calibrated=self.weight_scale.calibrated and bool(amax > 0))


def _saved_as(name: str, role: str) -> property:
    """What `layer.fp8_scale_input` and so on read: torch.distributed.checkpoint looks each key up as an attribute."""

    def read(layer: nn.Module) -> Tensor:
        if (scale := scales_of(layer).get(role)) is None or name not in scale.tensors():
            raise AttributeError(f"{PREFIX}{name}_{role}")
        return scale.tensors()[name]

    return property(read)


for _name, _role in itertools.product(("amax", "amax_history", "scale"), ROLES):
    setattr(ScaledLinear, f"{PREFIX}{_name}_{_role}", _saved_as(_name, _role))


def _load(scale: DelayedScale, saved: dict[str, Tensor], keys: dict[str, str]) -> list[str]:
    """Take what was saved; a longer history is cut, a shorter one padded with zeros, which say nothing.

    Returns the errors, as torch words them, with the checkpoint's keys.
    """
    saved = {name: tensor.clone() for name, tensor in saved.items()}  # they may be this very scale's
    own = scale.tensors()
    scale.forget()
    wrong = [name for name, tensor in saved.items() if tensor.dim() != own[name].dim()]
    if wrong or "scale" not in saved or scale.scale.is_meta:
        return [f"size mismatch for {keys[name]}: copying a param with shape {saved[name].shape}" for name in wrong]
    if scale.amax_history is not None and "amax_history" in saved:
        history = saved["amax_history"].nan_to_num(0.0, 0.0, 0.0)  # as updates do: what is not finite is no evidence
        kept = min(len(history), len(scale.amax_history))
        scale.amax_history[:kept] = history[:kept]
    if "amax" in saved:
        scale.amax.copy_(saved["amax"])
    evident = saved["scale"].isfinite() & (saved["scale"] > 0)
    scale.set_scale(torch.where(evident, saved["scale"], 0.0), calibrated=bool(evident))
    return []
