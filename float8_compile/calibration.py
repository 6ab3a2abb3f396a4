"""Delayed state by hand: update, reset, calibrate. Not needed where an optimizer of torch's steps the model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from float8_compile.delayed import DelayedScale
from float8_compile.delayed_step import advance, scales_of
from float8_compile.linear import Float8Linear


def update_delayed_scaling(module: nn.Module) -> None:
    """Move the delayed scales of the model's layers on, from the amaxes since the last update and from the weights.

    Happens by itself after `optimizer.step()`. Call it where the optimizer holds copies of the weights, or is no
    `torch.optim.Optimizer`, and after weights were changed in place by anything but an optimizer or
    `load_state_dict`: until then, numbers beyond a weight's old amax saturate. A second call does nothing more.
    Under torch.distributed every rank must call it.

    Raises ValueError where the model has no layer with delayed scaling.
    """
    advance(set(_delayed_layers(module)).__contains__)


def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: Any = None) -> None:
    """float8_experimental's name for `update_delayed_scaling`. fp8_layers: the layers, where they are known already."""
    advance(set(_delayed_layers(model) if fp8_layers is None else fp8_layers).__contains__)


@torch.no_grad()
def reset_delayed_scaling(module: nn.Module) -> None:
    """Forget amaxes, histories and scales: the next step uses dynamic scales, as the first one did.

    Raises ValueError where the model has no layer with delayed scaling.
    """
    for layer in _delayed_layers(module):
        for scale in scales_of(layer).values():
            scale.forget()


@torch.no_grad()
def mark_calibrated(module: nn.Module) -> None:
    """Take the present scales as evidence: what is compiled from here on is the graph of the steady state.

    For a preview of it, or for a run whose scales were set by hand. A tensor without a scale gets 1, a weight the exact
    one of its amax.

    Raises ValueError where the model has no layer with delayed scaling.
    """
    for layer in _delayed_layers(module):
        layer.measure_weight()
        for scale in scales_of(layer).values():
            if not scale.scale.is_meta:
                scale.set_scale(torch.where(scale.scale > 0, scale.scale, 1.0))
            scale.calibrated = True


@contextlib.contextmanager
def calibrate(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, whatever the model runs is evidence for its delayed scales, in training or not; at the end they move on.

        with calibrate(model):
            loss(model(batch)).backward()        # without backward, gradients begin with dynamic scales

    What was compiled runs eagerly inside, so nothing is compiled that the first real step would not use again. Layers
    that were always given the very same tensor (q, k and v) share its scale from then on, and cast it once.
    If the block raises, the state is as before it, but for the running amaxes.

    Raises ValueError where the model has no layer with delayed scaling.
    """
    layers = _delayed_layers(module)
    inputs = _Inputs()
    handles = [layer.register_forward_pre_hook(inputs.note) for layer in layers]
    before = [layer.calibrating for layer in layers]
    try:
        for layer in layers:
            layer.calibrating = True
        with torch.compiler.set_stance("force_eager"):
            yield module
    finally:
        for handle, layer, calibrating in zip(handles, layers, before, strict=True):
            handle.remove()
            layer.calibrating = calibrating
    advance(set(layers).__contains__)
    inputs.share()


def _delayed_layers(module: nn.Module) -> list[Float8Linear]:
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear) and scales_of(layer)]
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no layer with delayed scaling: convert it with config='delayed', or with a "
            "recipe of which a Cast has scaling='delayed'"
        )
    return layers


class _Inputs:
    """Which layers read the same tensors."""

    def __init__(self) -> None:
        self.tensors, self.numbers = WeakIdKeyDictionary(), itertools.count()
        self.read_by: dict[Float8Linear, tuple[int, ...]] = {}

    def note(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(layer, Float8Linear):
            number = self.tensors.setdefault(args[0], next(self.numbers))
            self.read_by[layer] = (*self.read_by.get(layer, ()), number)

    def share(self) -> None:
        """Give those that read the same tensors, each time, the input scale of the first of them."""
        first: dict[Any, DelayedScale] = {}
        for layer, numbers in self.read_by.items():
            if (scale := layer.input_scale) is not None:
                layer.input_scale = first.setdefault((scale.scales, numbers), scale)
