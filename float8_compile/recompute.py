"""Keep or recompute the casted weight: a choice per layer, and what each choice costs.

Backward multiplies the gradient with the float8 weight. `Float8Linear.recompute_weight_cast` says where it comes
from:

    True    cast again in backward: reads the weight once more and writes its float8 copy, 3 bytes an element for a
            bfloat16 weight; nothing of the weight's size stays alive between forward and backward
    False   kept from forward: N·K bytes alive from the layer's forward to its backward; forward's cast kernel writes
            it in backward's layout beside its own, so the price is one byte written per element, and the 3 are saved

So with b bytes per element of the weight, keeping spares b bytes of traffic for each byte it keeps (b read and 1
written against 1 written), whatever the shape; `weights_to_keep` fills a budget by that. In time that is b·N·K / B
seconds a microbatch, with B bytes/s of memory bandwidth, or, against the layer's three GEMMs of 6·M·N·K operations
at P operations/s, a share of b·P / (6·B·M). On an H100 (P = 1.98e15, B = 3.35e12) a bfloat16 weight's share is
197 / M: 2.4 % at M = 8192 tokens, 10 % at 2048. Keep where microbatches are small and memory is left; recompute where
activations fill the device.

How the choice reaches the compiled graph
-----------------------------------------
Eagerly the layer's autograd.Function saves the one or the other. In a compiled graph that means nothing: the min-cut
partitioner decides on its own (parameters count as free to save since torch 2.8, so it always casts again, and where
a weight is no parameter of the graph it always keeps). What it obeys are the tags of selective activation
checkpointing, so under Dynamo the weight's cast alone is a `torch.utils.checkpoint` region whose policy tags the
float8 result MUST_SAVE or MUST_RECOMPUTE. Of the three ways that were seen to work (a tag through an Inductor pass, one
through `torch.fx.traceback.current_meta` under `allow_in_graph`, this one) it is the only one that needs neither a
setting of the user's nor a private name, and the only one that is part of the compile caches' keys (`cache_hash`).
The scale is always saved, so a weight's amax is taken once a step, also inside activation checkpointing.

Precedence: in a compiled graph a layer's setting wins over any checkpoint region or selective policy around it, for the
innermost region's tag is the one that stays. Eagerly a checkpoint region drops what its layers saved and runs them
again, so there the region wins and the setting matters only outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from float8_compile.cast import saturating_cast, scale_from_amax, tensor_amax
from float8_compile.delayed import DelayedScale, cast_with, scale_in_use
from float8_compile.gemm import stored_transposed
from float8_compile.recipe import FLOAT8_DTYPES, Cast, Recipe
from float8_compile.split import Across, shared_amax
from float8_compile.tensor import Float8Tensor, Operand, dequantized
from float8_compile.torch_internals import guard_or_false


def weights_to_keep(layers: Mapping[str, tuple[Tensor, Recipe]], budget: int) -> set[str]:
    """The layers, of {fqn: (weight, recipe)}, whose casted weights to keep within `budget` bytes.

    Largest gain per byte first (see above: the bytes of the weight's dtype), the larger weight first among equals,
    and whatever still fits after that. A layer without a float8 `grad_input` has nothing to keep.
    """
    kept: set[str] = set()
    candidates = [(fqn, w) for fqn, (w, recipe) in layers.items() if recipe.grad_input.is_float8]
    for fqn, w in sorted(candidates, key=lambda item: (-item[1].element_size(), -item[1].numel())):
        if w.numel() <= budget:
            kept.add(fqn)
            budget -= w.numel()
    return kept


def sac_save_ops() -> frozenset[Any]:
    """Ops that a selective checkpoint policy of your own should save for this package's layers: GEMMs and amaxes.

    A policy that returns MUST_SAVE for these and PREFER_RECOMPUTE for the rest repeats only pointwise casts in
    backward: no GEMM and no reduction. An amax is a few bytes (a row's, two a row); a GEMM's output is M·N.
    """
    aten = torch.ops.aten
    return frozenset({aten._scaled_mm.default, aten.mm.default, aten.amax.default, aten.max.default})


def cast_weight(
    w: Tensor,
    recipe: Recipe,
    recompute: bool,
    read_by_backward: bool,
    delayed: DelayedScale | None = None,
    across: Across | None = None,
) -> tuple[Operand, Operand | None]:
    """The weight (N, K) as `output` multiplies it, and the cast of it that backward is handed.

    The second is None where backward casts the weight by itself or has no use for it (`read_by_backward` False:
    the input needs no gradient), and the first one again where one cast serves both GEMMs. Under Dynamo backward is
    always handed the cast: there the tag on it decides what becomes of it.

    across: the ranks that hold parts of the weight.
    """
    traced = torch.compiler.is_dynamo_compiling()
    handed_on = read_by_backward and torch.is_grad_enabled() and (traced or not recompute)
    if recipe.casts_weight_once:
        w8 = _cast_tagged(w, recipe.output.right, delayed, recompute, across=across)
        return w8, w8 if handed_on else None
    w8 = _cast_tagged(w, recipe.output.right, delayed, recompute=True, across=across)
    if not handed_on or not recipe.grad_input.is_float8:
        return w8, None
    other_w8 = _cast_tagged(w, recipe.grad_input.right, delayed, recompute, axis=0, across=across)
    if traced and not recompute:
        w8 = _needed_in_forward(w8, other_w8)
    return w8, other_w8


def gathered_weight(
    w: Tensor, w8: Operand, recipe: Recipe, recompute: bool, read_by_backward: bool, across: Across | None = None
) -> tuple[Operand, Operand | None]:
    """`cast_weight` for a weight that FSDP2 has gathered in float8, `w8` its parts.

    To recompute is to gather again: nothing is kept but FSDP2's own buffer, which is empty until backward fills it. To
    keep is a copy of that.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if not (read_by_backward and torch.is_grad_enabled() and recipe.grad_input.is_float8):
        return w8, None
    if recipe.casts_weight_once:
        if not traced:
            return w8, w8
        other_w8 = Operand(_tagged(recompute, _stored_transposed, w8.payload), w8.scale, w8.unscale)
    elif recompute and not traced:
        return w8, None
    else:
        assert w8.scale is not None
        with torch.no_grad():
            high = dequantized(w8.payload, w8.scale, w.dtype)
        other_w8 = _cast_tagged(high, recipe.grad_input.right, None, recompute, axis=0, across=across)
    return w8 if recompute or not traced else _needed_in_forward(w8, other_w8), other_w8


@torch.no_grad()
def _stored_transposed(payload: Tensor) -> Tensor:
    return stored_transposed(payload)


def _cast_tagged(
    w: Tensor, how: Cast, delayed: DelayedScale | None, recompute: bool, axis: int = -1, across: Across | None = None
) -> Operand:
    """`cast_with(w, how, delayed)`, tagged under Dynamo so that backward keeps or recomputes it."""
    taggable = torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()
    if how.dtype is None or isinstance(w, Float8Tensor) or not taggable:
        with torch.no_grad():
            return cast_with(w, how, delayed, axis=axis, across=across)
    stored = delayed if how.is_delayed else None
    if stored is not None and stored.calibrated:
        return Operand(_tagged(recompute, _cast, w, stored.scale, how), stored.scale, stored.unscale)
    with torch.no_grad():
        amax = shared_amax(tensor_amax(w, how.granularity, axis, produced=False), how, axis, across)
    return Operand(*_tagged(recompute, _cast_and_scale, w, amax, how, None if stored is None else stored.scale))


def _tagged(recompute: bool, function: Callable[..., Any], *args: Any) -> Any:
    context_fn = _CONTEXTS[recompute]
    return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, preserve_rng_state=False)


def _needed_in_forward(operand: Operand, kept: Operand) -> Operand:
    """The operand, with an unscale that depends on `kept`: the smaller of it and a number that is never smaller.

    Where backward wants another cast of the weight than forward (`rowwise`), forward has no use for it, and the
    partitioner does not honour MUST_SAVE on what forward does not compute. Zero times an element would do as well,
    if Inductor did not fold a product with zero away before it partitions.
    """
    if operand.unscale is None or kept.unscale is None or guard_or_false(kept.payload.numel() == 0):
        return operand
    never_smaller = kept.payload[0, 0].float().abs() + torch.finfo(torch.float32).max
    return Operand(operand.payload, operand.scale, torch.minimum(operand.unscale, never_smaller))


@torch.no_grad()
def _cast(w: Tensor, scale: Tensor, how: Cast) -> Tensor:
    # no_grad is inside: a checkpoint region entered without gradients is not tagged.
    assert how.dtype is not None
    return saturating_cast(w, scale, how.dtype, foreign=True)


@torch.no_grad()
def _cast_and_scale(w: Tensor, amax: Tensor, how: Cast, stored: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    assert how.dtype is not None
    scale = scale_from_amax(amax, how.dtype, how.power_of_two)
    if stored is not None:
        scale = scale_in_use(scale, stored)
    return saturating_cast(w, scale, how.dtype, foreign=stored is not None), scale, scale.reciprocal()


def _policy(recompute: bool, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What the partitioner shall do with the result of one op of `_cast_and_scale`."""
    if op is torch.ops.aten._to_copy.default:
        if kwargs.get("dtype") in FLOAT8_DTYPES:
            return CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE
        if args[0].dtype is torch.float64:  # the scale: a few bytes that spare the amax
            return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten.clone.default and not recompute:  # of a gathered weight, into backward's layout
        return CheckpointPolicy.MUST_SAVE
    if op in (torch.ops.aten.clone.default, torch.ops.aten.t.default) and recompute:  # else its view would be saved
        return CheckpointPolicy.MUST_RECOMPUTE
    if op is torch.ops.aten.reciprocal.default or (op is torch.ops.aten.where.self and args[0].dim() == 0):
        return CheckpointPolicy.MUST_SAVE
    # The steps in between are left to the partitioner, which takes PREFER_SAVE for no tag at all. Tagged as
    # recomputed, the weight's float32 copy would be saved wherever two regions share it (`cleanup_recompute_tags`).
    return CheckpointPolicy.PREFER_SAVE


def _contexts(recompute: bool) -> partial[Any]:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, recompute))
    # AOTAutograd's cache asks a context_fn for this, and so never mixes up the two settings.
    contexts.cache_hash = f"float8_compile {__name__} 2 {recompute}"  # type: ignore[attr-defined]
    return contexts


_CONTEXTS = {recompute: _contexts(recompute) for recompute in (True, False)}
