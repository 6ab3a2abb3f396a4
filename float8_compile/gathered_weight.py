"""A weight that FSDP2 shards and gathers in float8: one byte an element over the wire, and in memory.

    before fully_shard    the weight, the same object, is a `GatheredParameter`
    fully_shard           asks it for its shard, which so becomes a `GatheredShard`, the DTensor's local tensor: an
                          ordinary one, in high precision, to optimizers and checkpoints
    each all-gather       FSDP2 asks the shard what to send: the payload as uint8 (gloo knows no float8, and NCCL
                          likes bytes), under a scale per row the rows' scales with it
    forward, backward     read the `Float8Tensor` that FSDP2 puts in the weight's place

Which scales: weight_gather.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.recipe import Cast
from float8_compile.tensor import Float8Tensor
from float8_compile.torch_internals import (
    disabled_torch_function,
    local_part,
    put_local_part,
    without_dispatch,
    without_subclass,
    written_arguments,
)
from float8_compile.weight_gather import Model, WeightGather, measure_stale

aten = torch.ops.aten


def gather_of(layer: nn.Linear, cast: Cast, model: Model) -> WeightGather:
    """A new one; or, where the weight is another layer's too, the one that this has.

    Raises RuntimeError for a weight that is sharded already: FSDP2 asks once, when it shards.
    """
    if isinstance(layer.weight, GatheredParameter):
        return layer.weight.weight_gather
    if isinstance(local := local_part(layer.weight), GatheredShard):
        return local.weight_gather
    weight: Any = layer.weight
    if hasattr(weight, "placements") and (vars(layer).get("split") is None or weight.device_mesh.ndim > 1):
        raise RuntimeError(
            f"layer {getattr(layer, 'fqn', '')!r}: its weight is sharded already, and FSDP2 asks for a float8 "
            "all-gather when it shards: set fsdp_float8_all_gather before fully_shard"
        )
    gather = WeightGather(layer, cast, model)
    bind(gather, layer)
    return gather


def bind(gather: WeightGather, layer: nn.Linear) -> None:
    """Have the layer's present weight gathered: after conversion, and where another took its place."""
    if gather.scale.device != layer.weight.device:
        gather.allocate(layer.weight.device)
    weight = layer.weight
    local = local_part(weight)
    if local is None:
        if not isinstance(weight, GatheredParameter | Float8Tensor):
            if type(weight) is not nn.Parameter:
                return  # computed from others (parametrized): no gather, which forward will say
            weight.__class__ = GatheredParameter
        if isinstance(weight, GatheredParameter):
            weight.weight_gather, gather.shape = gather, tuple(weight.shape)
    elif not isinstance(local, Float8Tensor) and getattr(local, "weight_gather", None) is not gather:
        if not gather.is_sharded:  # tensor parallelism has sharded it
            gather.shape = tuple(local.shape)
        if isinstance(local, GatheredShard):  # another model's, which load_state_dict has assigned
            local = without_dispatch(aten.alias.default, (local,), {})
        put_local_part(weight, _shard(local, gather))


def release(gather: WeightGather, layer: nn.Linear) -> None:
    """Leave the weight alone from here on. Raises RuntimeError where FSDP2 has it already."""
    if gather.is_sharded:
        raise RuntimeError(
            f"layer {getattr(layer, 'fqn', '')!r}: its weight is sharded to be gathered in float8, which FSDP2 "
            "can't change any more: set fsdp_float8_all_gather before fully_shard"
        )
    if isinstance(layer.weight, GatheredParameter):
        del layer.weight.weight_gather
        layer.weight.__class__ = nn.Parameter  # type: ignore[assignment]


def high_precision(weight: Tensor) -> Tensor:
    """The weight for a high-precision GEMM: one that was gathered in float8 is what it was rounded to."""
    return _Dequantized.apply(weight) if isinstance(weight, Float8Tensor) else weight


class _Dequantized(torch.autograd.Function):
    """`dequantize`, through which the gradient goes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Float8Tensor) -> Tensor:  # type: ignore[override]
        return weight.dequantize()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class GatheredParameter(nn.Parameter):
    """A live `nn.Parameter`, the same object, of which FSDP2 makes a `GatheredShard`. Copies and pickles are plain."""

    weight_gather: WeightGather

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = without_subclass(func, args, kwargs or {})
        if func is Tensor.new_zeros and isinstance(args[0], GatheredParameter):
            return _taken(result, args[0].weight_gather)
        # nn.Parameter(weight) wants it so.
        return result.as_subclass(GatheredParameter) if func is Tensor.detach else result

    def _plain(self) -> Tensor:
        tensor: Tensor = without_subclass(Tensor.detach, (self,), {})
        return nn.Parameter(tensor, self.requires_grad) if "weight_gather" in vars(self) else tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copied = nn.Parameter(without_subclass(Tensor.clone, (self,), {}).detach(), self.requires_grad)
        memo[id(self)] = copied
        return copied


class GatheredShard(Tensor):
    """A rank's part of a weight, which FSDP2 asks what to send. Its copies and pickles are plain tensors.

    What FSDP2 makes of it when it shards, pads or moves it, and what `to_empty` makes, is one again.
    """

    weight_gather: WeightGather

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = without_dispatch(func, args, kwargs or {})
        for written in written_arguments(func, args, kwargs or {}):
            if isinstance(written, GatheredShard):
                written.weight_gather.note_write(written)
        still = func in _STILL_A_SHARD or (func is aten.view.default and result.shape == args[0].shape)  # `to_local`
        if still and isinstance(args[0], GatheredShard):
            made = _taken if func is aten.new_zeros.default else _shard
            return made(result, args[0].weight_gather)
        return result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What FSDP2 sends of this shard, and what it hands on to `fsdp_post_all_gather`.

        With the mesh only: with more arguments FSDP2 wants everything that is sent to have the weight's own shape.
        """
        gather = self.weight_gather
        gather.note_sharded()
        measure_stale(gather)
        payload, *scales = gather.sent(self, mesh)
        if not gather.by_row:
            return (payload,), gather.scale
        if mesh.size() == 1:  # where FSDP2 copies only the first of what it is given
            return (payload,), scales[0]
        return (payload, *scales), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The gathered weight, when FSDP2 first asks; from then on it is filled in place."""
        gather = self.weight_gather
        if out is not None:
            if gather.by_row and scale is not None:
                held: Any = local_part(out)
                # Through .data, as FSDP2 fills payloads: autograd shall not take what is gathered again for a change.
                (out if held is None else held).scale.data.copy_(scale)
            return None
        payload, *scales = all_gather_outputs
        assert gather.cast.dtype is not None
        scale = scales[0] if scale is None else scale
        return Float8Tensor(payload.view(gather.cast.dtype), scale, dtype), ()

    def __deepcopy__(self, memo: Any) -> Tensor:  # type: ignore[override]
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return without_dispatch(aten.alias.default, (self,), {}).__reduce_ex__(protocol)


_STILL_A_SHARD = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten._pin_memory.default,
    aten._to_copy.default,
}


def _shard(tensor: Tensor, gather: WeightGather) -> GatheredShard:
    shard = tensor.as_subclass(GatheredShard)
    shard.weight_gather = gather
    return shard


def _taken(tensor: Tensor, gather: WeightGather) -> GatheredShard:
    gather.is_sharded = True
    return _shard(tensor, gather)
