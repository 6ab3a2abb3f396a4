"""Each weight cast once per optimizer step, instead of in each microbatch.

    optimizer.step()  ->  after_step  ->  delayed scales move on
                                          the casts of the weights it holds are written, all in one call, on a GPU a
                                          compiled one
    forward, backward                     read them (cached_weight.py), in training; in `eval()` weights are cast as
                                          without a cache

Costs 1 byte an element of the weight where backward reads the same cast as forward, and transposes it; 2 where the
layer keeps its casted weight (`recompute_weight_cast=False`: both layouts lie ready) or the recipe casts the weight in
two ways (`rowwise`, `rowwise_with_gw_hp`). Worth it from two microbatches a step on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.after_step import listen
from float8_compile.cached_weight import CachedWeight, Job, write, write_all
from float8_compile.linear import Float8Linear
from float8_compile.torch_internals import with_own_code

_AFTER_DELAYED_SCALES = 1

_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def cache_weight_casts(module: nn.Module) -> WeightCache:
    """Cast the weights of the model's Float8Linears once per optimizer step; forward and backward only read them.

    Call it after conversion and before or after `torch.compile`; a second call makes the casts anew, for another
    `recompute_weight_cast`. Numbers are bitwise those without a cache: what writes to a weight otherwise (`copy_`,
    `.data`, a checkpoint, another dtype or device) is noticed before the next forward, and that weight is cast again.
    The optimizers are those that delayed scaling sees. After a write that torch doesn't count (watched.py says which,
    torch.distributed's among them) and that is no step of a `torch.optim.Optimizer`, call `refresh`. The cache is no
    state: no file and no deepcopy of the model has it.

    Returns a handle, also a context manager: `refresh()`, `remove()`, `nbytes`.

    Raises ValueError where there is no Float8Linear, TypeError for a sharded weight (FSDP2, tensor parallel) and for
    one that is no plain `nn.Parameter`, RuntimeError for one made under `inference_mode`; then nothing has changed.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    if not layers:
        raise ValueError(f"{type(module).__name__} has no Float8Linear: call convert_to_float8_training(model) first")
    return WeightCache(layers)


class WeightCache:
    """What `cache_weight_casts` returns: the cast weights of some layers, which live as long as those."""

    def __init__(self, layers: Sequence[Float8Linear]) -> None:
        casts: list[tuple[Float8Linear, CachedWeight]] = []
        try:
            for layer in layers:
                if layer.recipe.output.is_float8 or layer.recipe.grad_input.is_float8:
                    casts.append((layer, CachedWeight(layer, self)))
            write([cast for _, cast in casts])
        except BaseException:
            for _, cast in casts:
                cast.release()
            raise
        for layer, cast in casts:
            layer.hold(cast)
        self._layers = [weakref.ref(layer) for layer, _ in casts]
        self._compiled: Callable[[Sequence[Job]], Any] | None = None
        _caches.add(self)
        listen(_after_step, turn=_AFTER_DELAYED_SCALES)

    def refresh(self) -> None:
        """Cast all weights anew, whatever is known of them."""
        self._refresh(lambda layer: True)

    def remove(self) -> None:
        """Free the cast weights: from here on each forward casts for itself."""
        for layer in self._held():
            layer.hold(None)
        _caches.discard(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the cast weights and their scales."""
        return sum(cast.nbytes for cast in self._held().values())

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _held(self) -> dict[Float8Linear, CachedWeight]:
        """The layers that are alive and still have their casts from here."""
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        held = {layer: cast for layer in layers if (cast := vars(layer).get("cached_weight")) is not None}
        return {layer: cast for layer, cast in held.items() if cast.owner is self}

    def _refresh(self, chosen: Callable[[Float8Linear], bool]) -> None:
        held = self._held()
        taken = {layer: cast for layer, cast in held.items() if chosen(layer)}
        for layer, cast in taken.items():
            cast.bind(layer.weight)  # type: ignore[arg-type]
        casts = [cast for layer, cast in taken.items() if not layer.weight.is_meta]
        # Parts of it, as of an optimizer per parameter, would be a graph each.
        whole = len(casts) >= sum(layer.weight.requires_grad for layer in held)
        if casts:
            write(casts, self._in_one_graph() if whole and casts[0].weight.is_cuda else write_all)

    def _in_one_graph(self) -> Callable[[Sequence[Job]], Any]:
        """On a GPU only, where a cast in pieces would read and write a weight five times."""
        if self._compiled is None:
            compile: Any = torch.compile
            self._compiled = compile(with_own_code(write_all), fullgraph=True, dynamic=False)
        assert self._compiled is not None
        return self._compiled


def _after_step(stepped: set[int], skipped: Tensor | None) -> None:
    # Where a fused optimizer has skipped the step, on the device, the casts are written again as they were.
    for cache in list(_caches):
        cache._refresh(lambda layer: id(layer.weight) in stepped)
