"""Keep or recompute the casted weight."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from float8_compile.cast import cast, saturating_cast, scale_from_amax, tensor_amax
from float8_compile.recipe import Cast
from float8_compile.tensor import Float8Tensor


def _policy(decision: CheckpointPolicy, *_: object, **__: object) -> CheckpointPolicy:
    return decision


def _contexts(decision: CheckpointPolicy) -> partial:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, decision))
    contexts.cache_hash = f"float8_compile.recompute {decision.name}"  # type: ignore[attr-defined]
    return contexts


_CONTEXTS = {True: _contexts(CheckpointPolicy.MUST_RECOMPUTE), False: _contexts(CheckpointPolicy.MUST_SAVE)}


def backward_reads_cast(recompute: bool) -> bool:
    return not recompute or torch.compiler.is_dynamo_compiling()


def cast_weight(w: Tensor, how: Cast, recompute: bool, axis: int = -1) -> Tensor:
    if how.dtype is None or isinstance(w, Float8Tensor) or not torch.compiler.is_dynamo_compiling():
        return cast(w, how, axis)
    scale = scale_from_amax(tensor_amax(w, how.granularity, axis), how.dtype, how.power_of_two)
    payload = checkpoint(
        saturating_cast,
        w,
        scale,
        how.dtype,
        use_reentrant=False,
        context_fn=_CONTEXTS[recompute],
        preserve_rng_state=False,
    )
    return Float8Tensor(payload, scale, w.dtype)
