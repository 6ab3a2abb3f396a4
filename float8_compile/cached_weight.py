"""One layer's weight as its GEMMs read it: cast once, and again where the weight has changed.

    output       (N, K), contiguous, with its scale: what `output` multiplies
    grad_input   what `grad_input` multiplies, stored column by column: another cast where the recipe wants one
                 (`rowwise`), or a copy of the same one where the layer keeps its casted weight

A payload never stands without the scale that it was cast with, and both are only written here. Whether they are still
the weight's is asked before they are read, eagerly and before each call of a compiled graph: of the parameter's count
of writes (watched.py) and of the delayed scale's. So the optimizer's hook (weight_cache.py) makes it quick; right it is
without, but for fused optimizers, whose writes torch doesn't count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8_compile.delayed import DelayedScale, cast_with
from float8_compile.recipe import Cast, Recipe
from float8_compile.tensor import Operand
from float8_compile.torch_internals import break_graph_if_written, mark_static_address, without_modes
from float8_compile.watched import WatchedParameter, Watcher, unwatch, watch


class CachedWeight:
    """The cast weight of one layer, in buffers that keep their addresses.

    output, grad_input: see this module. None where that GEMM runs in high precision; `grad_input` also where backward
        reads `output`.
    nbytes: of the buffers, N·K or twice that, and the scales.
    owner: the cache that it belongs to.

    Raises TypeError for a weight that is no plain `nn.Parameter` on one device (sharded, computed from others),
    RuntimeError for one that was made under `inference_mode`, whose writes nobody counts.
    """

    output: Operand | None
    grad_input: Operand | None

    def __init__(self, layer: Any, owner: object) -> None:
        self._layer, self.owner = weakref.ref(layer), owner
        self.recipe: Recipe = layer.recipe
        self.copies = not layer.recompute_weight_cast
        _check(layer.weight, layer.fqn)
        self.weight: nn.Parameter = layer.weight
        self._written: tuple[Any, ...] | None = None
        self._allocate()
        itself = weakref.ref(self)  # a weight that held it would keep both alive, until they are collected
        self._watcher: Watcher = lambda: None if (cast := itself()) is None else cast._bring_up_to_date()
        watch(self.weight, self._watcher)  # last: what raises before leaves the weight as it was

    def holds(self, weight: Tensor) -> bool:
        """Whether this is the cast of this weight. Where the weight has changed it is cast anew before the answer."""
        # Where swap_tensors has put a plain one here the layer casts it itself, until `bind`.
        if weight is not self.weight or not isinstance(weight, WatchedParameter):
            return False
        break_graph_if_written(weight)
        return weight.watchers_asked

    def operands(self) -> tuple[Operand, Operand | None]:
        """The weight as `output` multiplies it, and what backward is handed: the same where one cast serves both."""
        output = Operand(self.weight) if self.output is None else self.output
        return output, output if self.recipe.casts_weight_once and self.grad_input is None else self.grad_input

    def bind(self, weight: nn.Parameter) -> None:
        """Be the cast of another parameter, one that took the weight's place in the layer."""
        if weight is self.weight and isinstance(weight, WatchedParameter):
            return
        if not isinstance(weight, nn.Parameter):  # by now computed from others (parametrized, pruned): not in use
            return
        layer = self._layer()
        _check(weight, getattr(layer, "fqn", ""))
        unwatch(self.weight, self._watcher)
        self.weight, self._written = weight, None
        watch(weight, self._watcher)

    def fit(self, recipe: Recipe) -> None:
        """Be the cast that another recipe wants."""
        self.recipe, self._written = recipe, None
        self._allocate()

    def release(self) -> None:
        """Leave the weight as it was found."""
        unwatch(self.weight, self._watcher)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """The buffers, payloads and scales."""
        return [tensor for operand in (self.output, self.grad_input) for tensor in operand or () if tensor is not None]

    def _bring_up_to_date(self) -> None:
        state = self._state()
        if self._written != state:
            write([self])

    def _state(self) -> tuple[Any, ...]:
        """What the buffers depend on: how often that was written to."""
        if not isinstance(self.weight, WatchedParameter):  # swap_tensors has put another one here
            watch(self.weight, self._watcher)
        assert isinstance(self.weight, WatchedParameter)
        scale = self._delayed()
        return *self.weight.writes(), scale, None if scale is None else scale.scale._version

    def _delayed(self) -> DelayedScale | None:
        layer = self._layer()
        return None if layer is None else layer.weight_scale

    def _allocate(self) -> None:
        """Buffers of the weight's shape, on its device; NaN until they are written."""
        how, other = self.recipe.output.right, self.recipe.grad_input.right
        with torch.inference_mode(False), torch.no_grad():
            self.output = _empty(self.weight, how, axis=-1)
            once = self.recipe.casts_weight_once
            needed = self.recipe.grad_input.is_float8 and (self.copies or not once)
            self.grad_input = _empty(self.weight, other, axis=-1 if once else 0, transposed=True) if needed else None

    def _fits(self) -> bool:
        return all(
            operand.payload.shape == self.weight.shape and operand.payload.device == self.weight.device
            for operand in (self.output, self.grad_input)
            if operand is not None
        )


class Job(NamedTuple):
    """What one write needs, without Python state that a compiled graph would have to guard."""

    weight: Tensor
    recipe: Recipe
    delayed: DelayedScale | None
    output: Operand | None
    grad_input: Operand | None


def write_all(jobs: Sequence[Job]) -> None:
    """Cast each weight into its buffers. Pure torch: runs as it is, or as one compiled graph."""
    for weight, recipe, delayed, output, grad_input in jobs:
        w8 = cast_with(weight, recipe.output.right, delayed)
        if output is not None:
            _copy(output, w8)
        if grad_input is not None:
            if not recipe.casts_weight_once:
                w8 = cast_with(weight, recipe.grad_input.right, delayed, axis=0)
            _copy(grad_input, w8)


def write(casts: Sequence[CachedWeight], how: Callable[[Sequence[Job]], Any] = write_all) -> None:
    """Bring them up to date. What an exception leaves half-written is not taken for up to date.

    how: `write_all`, or a compiled one.
    """
    jobs = []
    for cast in casts:
        if not cast._fits():
            cast._allocate()
        cast._written = None
        jobs.append(Job(cast.weight, cast.recipe, cast._delayed(), cast.output, cast.grad_input))
    states = [cast._state() for cast in casts]
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        how(jobs)
    for cast, state in zip(casts, states, strict=True):
        cast._written = state


def _check(weight: Tensor, fqn: str) -> None:
    name = f"layer {fqn!r}" if fqn else "the layer"
    if hasattr(weight, "placements"):
        raise TypeError(
            f"{name}: its weight is sharded (DTensor), and a cache holds whole weights; leave out cache_weight_casts "
            "under FSDP2 and tensor parallelism, where a gather or a shard is cast once anyway"
        )
    if type(weight) not in (nn.Parameter, WatchedParameter):
        raise TypeError(
            f"{name}: its weight is a {type(weight).__name__}, and only writes to a plain nn.Parameter can be seen; "
            "cache the weights before a wrapper or a parametrization replaces them, or leave this model uncached"
        )
    if weight.is_inference():
        raise RuntimeError(
            f"{name}: its weight was made under torch.inference_mode, where torch counts no writes; make the model "
            "outside"
        )


def _empty(weight: Tensor, how: Cast, axis: int, transposed: bool = False) -> Operand | None:
    """Buffers for one cast of the weight: payload, scale, 1 / scale. None in high precision."""
    if how.dtype is None:
        return None
    shape = [] if how.granularity == "tensor" else [1 if axis % 2 == n else size for n, size in enumerate(weight.shape)]
    scale, unscale = (weight.new_full(shape, torch.nan, dtype=torch.float32) for _ in range(2))
    payload = torch.empty_like(
        weight.t() if transposed else weight, dtype=how.dtype, memory_format=torch.contiguous_format
    )
    operand = Operand(payload.t() if transposed else payload, scale, unscale)
    for tensor in (operand.payload, scale, unscale):
        mark_static_address(tensor)
    return operand


def _copy(into: Operand, operand: Operand) -> None:
    for target, source in zip(into, operand, strict=True):
        if target is not None and source is not None:
            target.copy_(source)
