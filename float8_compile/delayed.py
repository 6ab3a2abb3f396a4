"""Delayed scaling: this step's scales come from the amaxes of the steps before.

A dynamic scale needs two reads of a tensor, for its amax and for the cast; a delayed one needs the second only, in
which the amax for later steps is taken along. First the rule, a pure function; then the state that it moves:

    amax           the largest magnitude since the last update: forward and backward do `amax = maximum(amax, ...)`,
                   which is idempotent, so activation checkpointing, gradient accumulation and a layer that is called
                   twice are right by construction; inf or NaN lasts until the next finite one (`raise_to`)
    amax_history   the amaxes of earlier steps, the newest first
    scale          what casts multiply with; 0 where there is no evidence yet
    unscale        1 / scale, beside it because a graph would spend a kernel on it

A weight has no history. It changes in the optimizer step, so its amax is taken right after that, for all layers at
once, and is exact. Until there is evidence for a tensor, its scale is dynamic (`scale_in_use`).

All of it is float32 vectors, one entry per layer and role; layers hold views of one entry, and an update is a constant
number of ops for any number of layers. They are no buffers: casts of a model's dtype, DDP's broadcast and FSDP don't
reach them. Who moves them on, and when: delayed_step.py.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.cast import cast_operand, saturating_cast, scale_from_amax, tensor_amax
from float8_compile.recipe import Cast, DelayedScaling
from float8_compile.split import Across, shared_amax
from float8_compile.storage import own_storage
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import is_transformed, mark_static_address, raise_to

ROLES = ("input", "grad_output", "weight")  # the weights last: they have no history


def updated(
    amax_n: Tensor, history_nH: Tensor, scale_n: Tensor, how: Cast, delayed: DelayedScaling
) -> tuple[Tensor, Tensor]:
    """History and scale after a step with these amaxes, n tensors at once. Pure.

        A     = max(history, amax), or amax under "most_recent"
        scale = FP8_MAX / A / 2**margin

    Where a step's amax is 0 (nothing ran) or not finite, history and scale stay what they were.
    """
    assert how.dtype is not None
    evident = amax_n.isfinite() & (amax_n > 0)
    largest = torch.maximum(history_nH.amax(1), amax_n) if delayed.amax == "max" else amax_n
    # Times a power of two in float64 is exact, so this is the formula above to the bit.
    scale = scale_from_amax(largest.double() * 2.0**delayed.margin, how.dtype, how.power_of_two)
    rolled = torch.cat([amax_n.unsqueeze(1), history_nH[:, :-1]], dim=1)
    return torch.where(evident.unsqueeze(1), rolled, history_nH), torch.where(evident, scale, scale_n)


def scale_in_use(dynamic: Tensor, stored: Tensor) -> Tensor:
    """The stored scale, or the dynamic one where there is no evidence: decided on the device, entry by entry."""
    return torch.where(stored > 0, stored, dynamic)


class DelayedScales:
    """The vectors behind the entries of layers with equal settings, on one device: entry `role · layers + row`.

    amax, scale, unscale: (3 · layers,); amax_history: (2 · layers, history), without the weights.
    holders: the layers that have entries here, in order of conversion.
    updates: how often they were moved on. warned: whether the user knows that they never are.
    """

    def __init__(self, layers: int, delayed: DelayedScaling, casts: tuple[Cast | None, ...], device: Any) -> None:
        self.count, self.delayed, self.casts = layers, delayed, casts
        # 16 bytes each: Inductor takes inputs for aligned, and copies those that are not.
        self.amax, self.scale, self.unscale = (
            torch.zeros(len(ROLES) * layers, 4, dtype=torch.float32, device=device)[:, 0] for _ in range(3)
        )
        self.amax_history = torch.zeros(2 * layers, delayed.history, dtype=torch.float32, device=device)
        self._forget_others()

    def _forget_others(self) -> None:
        self.holders: list[weakref.ref[nn.Linear]] = []
        self.updates, self.warned = 0, False
        self._masks: dict[frozenset[int], Tensor] = {}
        self._siblings = weakref.WeakValueDictionary({self.amax.device: self})

    def on(self, device: torch.device) -> DelayedScales:
        """The same entries on another device, where a part of the layers may have gone."""
        if (there := self._siblings.get(device)) is None:
            there = DelayedScales(self.count, self.delayed, self.casts, device)
            there._siblings = self._siblings
            self._siblings[device] = there
        return there

    def entries(self, row: int) -> dict[str, DelayedScale]:
        """New entries of one layer, by role, for what its recipe delays."""
        return {
            role: DelayedScale(self, number * self.count + row)
            for number, (role, cast) in enumerate(zip(ROLES, self.casts, strict=True))
            if cast is not None
        }

    def mask(self, positions: set[int]) -> Tensor:
        """(3 · layers,) bool: these entries. Kept, since making it is a copy from the host."""
        key = frozenset(positions)
        if key not in self._masks:
            self._masks[key] = torch.tensor([n in key for n in range(len(self.amax))], device=self.amax.device)
        return self._masks[key]

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("holders", "updates", "warned", "_siblings", "_masks")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_others()


def move_on(
    amax: Tensor,
    moving: Tensor | None,
    running: Tensor,
    history: Tensor,
    scale: Tensor,
    unscale: Tensor,
    casts: tuple[Cast | None, ...],
    delayed: DelayedScaling,
) -> None:
    """One update of all of a `DelayedScales`' entries, in place, with this step's amaxes.

    moving: (3 · layers,) bool, the others stay what they are; None: all move.
    """
    count = len(amax) // len(ROLES)
    if moving is not None:
        amax = torch.where(moving, amax, 0.0)
    for number, (role, cast) in enumerate(zip(ROLES, casts, strict=True)):
        rows = slice(number * count, (number + 1) * count)
        if cast is None or cast.dtype is None:
            continue
        if role == "weight":  # exact: no history, no margin
            exact = scale_from_amax(amax[rows], cast.dtype, cast.power_of_two)
            scale[rows] = torch.where(amax[rows].isfinite() & (amax[rows] > 0), exact, scale[rows])
        else:
            history[rows], scale[rows] = updated(amax[rows], history[rows], scale[rows], cast, delayed)
    unscale.copy_(scale.reciprocal())
    running.copy_(torch.zeros_like(running) if moving is None else torch.where(moving, 0.0, running))


class DelayedScale:
    """One tensor's entry: 0-dim float32 tensors that keep their addresses.

    amax, scale, unscale: see this module. amax_history: (history,), None of a weight.
    calibrated: whether there is evidence, known to Python. It only leaves out of the graph what would not be used:
        the numbers are the same with it and without. Flips once, after the first step.

    Layers that read the same tensor can share one, and then cast it once: `k.input_scale = q.input_scale`.
    """

    amax: Tensor
    scale: Tensor
    unscale: Tensor
    amax_history: Tensor | None

    def __init__(self, scales: DelayedScales, position: int) -> None:
        self.calibrated = False
        self._view(scales, position)

    def _view(self, scales: DelayedScales, position: int) -> None:
        self.scales, self.position = scales, position

        def entry(vector: Tensor) -> Tensor:
            return mark_static_address(own_storage(vector[position]))

        self.amax, self.scale, self.unscale = entry(scales.amax), entry(scales.scale), entry(scales.unscale)
        has_history = position < len(scales.amax_history)
        self.amax_history = own_storage(scales.amax_history[position]) if has_history else None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by name."""
        if self.amax_history is None:
            return {"scale": self.scale}
        return {"amax": self.amax, "amax_history": self.amax_history, "scale": self.scale}

    def set_scale(self, scale: Tensor, calibrated: bool = True) -> None:
        """Take this scale, and whether it is evidence."""
        self.scale.copy_(scale)
        self.unscale.copy_(self.scale.reciprocal())
        self.calibrated = calibrated

    def forget(self) -> None:
        """Back to no evidence."""
        self.calibrated = False
        self.scales.updates = 0  # so that evidence is looked for again
        for tensor in (self.amax, self.scale, self.unscale, self.amax_history):
            if tensor is not None:
                tensor.zero_()

    def place(self, device: torch.device) -> None:
        """Move to a device, with the numbers; from meta, where there are none, to no evidence."""
        if device == self.scales.amax.device:
            return
        old = [self.amax, self.scale, self.unscale, self.amax_history]
        from_meta = self.amax.is_meta
        self._view(self.scales.on(device), self.position)
        if from_meta:
            return self.forget()
        for tensor, number in zip([self.amax, self.scale, self.unscale, self.amax_history], old, strict=True):
            if tensor is not None and number is not None:
                tensor.copy_(number)

    def __getstate__(self) -> tuple[DelayedScales, int, bool]:
        return self.scales, self.position, self.calibrated

    def __setstate__(self, state: tuple[DelayedScales, int, bool]) -> None:
        scales, position, self.calibrated = state
        self._view(scales, position)


def cast_with(
    x: Tensor,
    how: Cast,
    delayed: DelayedScale | None,
    *,
    axis: int = -1,
    record: bool = False,
    across: Across | None = None,
) -> Operand:
    """`cast_operand(x, how, axis, across)`, with the scale of `delayed` where `how` is delayed.

    record: take the amax along.

    Under torch.func's transforms nothing is recorded: they allow no write to a tensor from outside.
    """
    if not how.is_delayed or delayed is None or isinstance(x, Float8Tensor):
        return cast_operand(x, how, axis, across)
    assert how.dtype is not None
    records = record and not is_transformed()
    amax = tensor_amax(x) if records or not delayed.calibrated else None
    if records and amax is not None:
        raise_to(delayed.amax, amax)
    if delayed.calibrated or amax is None:
        scale, unscale = delayed.scale, delayed.unscale
    else:
        amax = shared_amax(amax, how, axis, across)
        scale = scale_in_use(scale_from_amax(amax, how.dtype, how.power_of_two), delayed.scale)
        unscale = scale.reciprocal()
    return Operand(saturating_cast(x, scale, how.dtype, foreign=True), scale, unscale)
