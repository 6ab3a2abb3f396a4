"""CUDA graphs of float8 layers: torch's own capture, and float8 state as it was before.

`torch.cuda.make_graphed_callables` runs each callable a few times before it captures, backward with gradients that
nobody has written: running amaxes record them, and flat gradients add them up. Here both are put back. What a graph
reads and writes keeps its address: delayed scales, cached weights and flat gradients are made once and written in
place, by the optimizer's hook outside the graph. A weight that something else has written to is cast again before a
replay, as before any other forward.

`torch.compile(mode="reduce-overhead")` needs nothing of this: the same tensors are marked as torch wants them
(`mark_static_address`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from float8_compile.cached_weight import CachedWeight
from float8_compile.delayed_step import running_amaxes_kept
from float8_compile.flat_gradients import flat_gradients_kept
from float8_compile.gradient_slice import slice_of
from float8_compile.linear import Float8Linear


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> Any:
    """`torch.cuda.make_graphed_callables`, which see for arguments and result, for models with Float8Linears.

    With delayed scaling, calibrate first (`calibrate`, or one step): a graph that was captured without evidence
    computes dynamic scales for ever, and uses them only where there is none. Cached weights (`cache_weight_casts`) and
    `FlatGradients` are made before; the graphs hold on to the casts that they read. Parameters whose gradients go into
    a flat buffer count as unused inputs, so `allow_unused_input` is on where there are any.

    Raises RuntimeError where there is no GPU; else what torch raises.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_graphed_callables: CUDA graphs need a GPU, and torch.cuda.is_available() is False; without one, "
            "leave the call out"
        )
    several = callables if isinstance(callables, tuple) else (callables,)
    modules = [list(c.modules()) if isinstance(c, nn.Module) else [] for c in several]
    layers = [[m for m in part if isinstance(m, Float8Linear)] for part in modules]
    unused = any(slice_of(layer.weight) is not None for part in layers for layer in part)
    with running_amaxes_kept(), flat_gradients_kept():
        graphed = torch.cuda.make_graphed_callables(
            callables, sample_args, num_warmup_iters, allow_unused_input or unused, pool
        )
    results = graphed if isinstance(graphed, tuple) else (graphed,)
    for result, part in zip(results, layers, strict=True):
        casts = [layer.cached_weight for layer in part if layer.cached_weight is not None]
        if casts:  # only of modules, to which torch gives another `forward`
            result.forward = _with_casts_up_to_date(result.forward, casts)
    return graphed


def _with_casts_up_to_date(replay: Callable[..., Any], casts: list[CachedWeight]) -> Callable[..., Any]:
    """A replay asks nothing, so it is asked before."""

    @wraps(replay)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for cast in casts:
            cast.holds(cast.weight)
        return replay(*args, **kwargs)

    vars(forward)["read_by_the_graph"] = [tensor for cast in casts for tensor in cast.tensors()]  # alive as long as it
    return forward
