"""Keep or recompute the casted weight: a choice per layer, and what each choice costs.

Backward multiplies the gradient with the float8 weight. `Float8Linear.recompute_weight_cast` says where it comes
from:

    True    cast again in backward: reads the weight once more and writes its float8 copy, 3 bytes an element for a
            bfloat16 weight; nothing of the weight's size stays alive between forward and backward
    False   kept from forward: N·K bytes alive from the layer's forward to its backward; forward's cast kernel writes
            it in backward's layout beside its own, so the price is one byte written per element, and the 3 are saved

So keeping saves `(b + 1 - 1) * N * K` bytes of traffic a step, with b the bytes per element of the weight, for N·K
bytes of memory: b bytes of traffic per byte kept, 2 for bfloat16, whatever the shape. At B bytes/s that is
`b * N * K / B` seconds a step (H100, 3.35e12 B/s: 40 us for a bfloat16 weight of 64 Mi elements, as long as that
layer's three GEMMs need for about 100 tokens), and the same per microbatch. Keep where memory is left over and
microbatches are small; recompute where activations fill the device.

How the choice reaches the compiled graph
-----------------------------------------
Eagerly the layer's autograd.Function saves the one or the other. In a compiled graph that means nothing: the min-cut
partitioner decides on its own (parameters count as free to save since torch 2.8, so it always casts again, and where
a weight is no parameter of the graph it always keeps). What it obeys are the tags of selective activation
checkpointing, so under Dynamo the weight's cast alone is a `torch.utils.checkpoint` region whose policy tags the
float8 result MUST_SAVE or MUST_RECOMPUTE. Of the three ways that were seen to work (a tag through a Inductor pass, one
through `torch.fx.traceback.current_meta` under `allow_in_graph`, this one) it is the only one that needs neither a
setting of the user's nor a private name, and the only one that is part of the compile caches' keys (`cache_hash`).
The scale is always saved, so a weight's amax is taken once a step, also inside activation checkpointing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from float8_compile.cast import cast, saturating_cast, scale_from_amax, tensor_amax
from float8_compile.recipe import FLOAT8_DTYPES, Cast
from float8_compile.tensor import Float8Tensor
from float8_compile.torch_internals import guard_or_false


def backward_reads_cast(recompute: bool) -> bool:
    """Whether backward is handed the cast made in forward, rather than the weight to cast by itself.

    Under Dynamo always: there the tag on the cast decides what becomes of it.
    """
    return not recompute or torch.compiler.is_dynamo_compiling()


def cast_weight(w: Tensor, how: Cast, recompute: bool, axis: int = -1) -> Tensor:
    """`cast(w, how, axis)`, tagged under Dynamo so that backward keeps or recomputes it."""
    traced = torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()
    if how.dtype is None or isinstance(w, Float8Tensor) or not traced:
        with torch.no_grad():
            return cast(w, how, axis)
    with torch.no_grad():
        amax = tensor_amax(w, how.granularity, axis)
    payload, scale = checkpoint(
        _scale_and_cast, w, amax, how, use_reentrant=False, context_fn=_CONTEXTS[recompute], preserve_rng_state=False
    )
    return Float8Tensor(payload, scale, w.dtype)


def needed_in_forward(t: Tensor, kept: Tensor | None) -> Tensor:
    """t, with a scale that depends on `kept`: plus zero times one of its elements.

    Where backward wants another cast of the weight than forward (`rowwise`), forward has no use for it, and the
    partitioner does not honour MUST_SAVE on what forward does not compute.
    """
    if not (isinstance(t, Float8Tensor) and isinstance(kept, Float8Tensor)) or guard_or_false(kept.numel() == 0):
        return t
    return Float8Tensor(t.payload, t.scale + 0 * kept.payload[0, 0].float(), t.dtype)


@torch.no_grad()
def _scale_and_cast(w: Tensor, amax: Tensor, how: Cast) -> tuple[Tensor, Tensor]:
    # no_grad is inside: a checkpoint region entered without gradients is not tagged.
    assert how.dtype is not None
    scale = scale_from_amax(amax, how.dtype, how.power_of_two)
    return saturating_cast(w, scale, how.dtype), scale


def _policy(recompute: bool, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What the partitioner shall do with the result of one op of `_scale_and_cast`."""
    if op is torch.ops.aten._to_copy.default:
        if kwargs.get("dtype") in FLOAT8_DTYPES:
            return CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE
        if args[0].dtype is torch.float64:  # the scale: a few bytes that spare the amax
            return CheckpointPolicy.MUST_SAVE
    # The steps in between are left to the partitioner, which takes PREFER_SAVE for no tag at all. Tagged as
    # recomputed, the weight's float32 copy would be saved wherever two regions share it (`cleanup_recompute_tags`).
    return CheckpointPolicy.PREFER_SAVE


def _contexts(recompute: bool) -> partial[Any]:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, recompute))
    # AOTAutograd's cache asks a context_fn for this, and so never mixes up the two settings.
    contexts.cache_hash = f"float8_compile {__name__} 1 {recompute}"  # type: ignore[attr-defined]
    return contexts


_CONTEXTS = {recompute: _contexts(recompute) for recompute in (True, False)}
