"""A weight that FSDP2 shards and gathers in float8: one byte an element over the wire, and in memory.

    before fully_shard    the weight, the same object, is a `GatheredParameter`
    fully_shard           asks it for its shard, which so becomes a `GatheredShard`, the DTensor's local tensor: an
                          ordinary one, in high precision, to optimizers and checkpoints
    each all-gather       FSDP2 asks the shard what to send: the payload as uint8 (gloo knows no float8, and NCCL
                          likes bytes), under a scale per row the rows' scales with it
    forward, backward     read the `Float8Tensor` that FSDP2 puts in the weight's place

One scale a tensor is one of the whole weight: each rank's amax, the largest of all ranks in one all-reduce for all
weights of a mesh. Since a weight changes only in the optimizer step, that is done right after it, and before a gather
only of weights that were written to otherwise. So a dynamic and a delayed scale of a weight are the same here: exact.
Rows are whole on a rank, so their scales need no reduction.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from float8_compile.after_step import listen
from float8_compile.cast import saturating_cast, scale_from_amax, tensor_amax
from float8_compile.recipe import Cast
from float8_compile.split import Across, shared_amax
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import (
    copy_all,
    disabled_torch_function,
    foreach_amax,
    local_part,
    mark_static_address,
    put_local_part,
    without_dispatch,
    without_subclass,
    written_arguments,
)

aten = torch.ops.aten

_alive: weakref.WeakValueDictionary[int, WeightGather] = weakref.WeakValueDictionary()  # in order, as on every rank
_numbers = itertools.count()


class Model:
    """What was converted together: counts the ops that wrote to its gathered weights, and those that are measured."""

    writes, measured = 0, 0


class WeightGather:
    """How one layer's weight is gathered.

    cast: of the weight, as `output` multiplies it.
    scale, unscale: () float32, at addresses that stay; of a cast by rows not used.
    shape: of the weight where it is whole, or of what tensor parallelism left of it.
    is_sharded: whether FSDP2 has taken it.
    model: the same object for all that were converted together, and so are measured together.
    writes: how many ops have written to a shard of it, or to what aliases one as a whole.
    """

    def __init__(self, layer: nn.Linear, cast: Cast, model: Model) -> None:
        self._layer, self.cast, self.model = weakref.ref(layer), cast, model
        self.shape: tuple[int, ...] = tuple(layer.weight.shape)
        self.is_sharded = False
        self.writes = 0
        self._sharded: weakref.ref[Tensor] | None = None
        self._measured: tuple[Any, ...] | None = None
        self._allocate(layer.weight.device)
        _alive[next(_numbers)] = self
        listen(_after_step)

    def _allocate(self, device: torch.device) -> None:
        # Ones, which nothing reads: the first gather measures.
        self.scale, self.unscale = (mark_static_address(torch.ones((), device=device)) for _ in range(2))
        self._measured = None

    @property
    def by_row(self) -> bool:
        """Whether each row of the weight has a scale of its own."""
        return self.cast.granularity == "row"

    def bind(self, layer: nn.Linear) -> None:
        """Have the layer's present weight gathered: after conversion, and where another took its place."""
        if self.scale.device != layer.weight.device:
            self._allocate(layer.weight.device)
        weight = layer.weight
        local = local_part(weight)
        if local is None:
            if not isinstance(weight, GatheredParameter | Float8Tensor):
                if type(weight) is not nn.Parameter:
                    return  # computed from others (parametrized): no gather, which forward will say
                weight.__class__ = GatheredParameter
            if isinstance(weight, GatheredParameter):
                weight.weight_gather, self.shape = self, tuple(weight.shape)
        elif not isinstance(local, Float8Tensor) and getattr(local, "weight_gather", None) is not self:
            if not self.is_sharded:  # tensor parallelism has sharded it
                self.shape = tuple(local.shape)
            if isinstance(local, GatheredShard):  # another model's, which load_state_dict has assigned
                local = without_dispatch(aten.alias.default, (local,), {})
            put_local_part(weight, _shard(local, self))

    def release(self, layer: nn.Linear) -> None:
        """Leave the weight alone from here on. Raises RuntimeError where FSDP2 has it already."""
        if self.is_sharded:
            raise RuntimeError(
                f"layer {getattr(layer, 'fqn', '')!r}: its weight is sharded to be gathered in float8, which FSDP2 "
                "can't change any more: set fsdp_float8_all_gather before fully_shard"
            )
        if isinstance(layer.weight, GatheredParameter):
            del layer.weight.weight_gather
            layer.weight.__class__ = nn.Parameter  # type: ignore[assignment]

    def sharded(self) -> Tensor | None:
        """The sharded parameter, which the optimizer has, also while the layer holds the gathered one."""
        return None if self._sharded is None else self._sharded()

    def note_sharded(self) -> None:
        """Called where the layer is known to hold the sharded parameter."""
        layer = self._layer()
        # Not any DTensor: where tensor parallelism has split it too, the gathered one is one as well.
        if layer is not None and self.is_sharded and isinstance(local_part(layer.weight), GatheredShard):
            self._sharded = weakref.ref(layer.weight)

    def note_write(self, written: Tensor) -> None:
        """Called where something was written that is a shard of this weight, or a copy of one, which doesn't count."""
        parameter = self.sharded()
        local = None if parameter is None else local_part(parameter)
        if local is None or local.untyped_storage().data_ptr() == written.untyped_storage().data_ptr():
            self.writes += 1
            self.model.writes += 1

    def is_stale(self, parameter: Tensor) -> bool:
        """Whether the parameter was written to since its scale was measured."""
        return self._measured != _writes(parameter)

    def take(self, parameter: Tensor) -> None:
        """The scale is this parameter's from now on."""
        self._measured = _writes(parameter)

    def operand(self, weight: Float8Tensor) -> Operand:
        """The gathered weight as the GEMMs take it."""
        if self.by_row:
            return Operand(weight.payload, weight.scale, weight.scale.reciprocal())
        return Operand(weight.payload, *(t.to(weight.device) for t in (self.scale, self.unscale)))  # may be offloaded

    def sent(self, shard: Tensor, mesh: Any) -> tuple[Tensor, ...]:
        """What a rank sends over FSDP2's mesh: bytes, and of a cast by rows their scales; padded to equal parts."""
        assert self.cast.dtype is not None
        rows = -(-self.shape[0] // mesh.size())
        if self.by_row:
            scale = scale_from_amax(self._amax_by_row(shard, mesh), self.cast.dtype, self.cast.power_of_two)
        else:
            scale = self.scale.to(shard.device)  # of an offloaded weight it is elsewhere
        payload = saturating_cast(shard, scale, self.cast.dtype).view(torch.uint8)
        missing = rows - shard.shape[0]
        payload = pad(payload, (0, 0, 0, missing)) if missing else payload
        if not self.by_row:
            return (payload,)
        return payload, pad(scale, (0, 0, 0, missing), value=1.0) if missing else scale

    def _amax_by_row(self, shard: Tensor, mesh: Any) -> Tensor:
        amax = tensor_amax(shard, "row") if shard.numel() else shard.new_zeros(shard.shape[0], 1)
        parameter: Any = self.sharded()
        for dim, placement in enumerate(parameter.placements):
            if getattr(placement, "dim", 0) == 1:  # rows are split
                group = parameter.device_mesh.get_group(dim)
                if group is mesh.get_group():
                    raise NotImplementedError("FSDP2 shards axis 1, so that no rank has whole rows to scale")
                amax = shared_amax(amax, self.cast, 1, Across(1, group))
        return amax


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
    gather.bind(layer)
    return gather


def _writes(parameter: Tensor) -> tuple[Any, ...]:
    """Counted by torch on the DTensor (`copy_`, `load_state_dict`) or on its local tensor, or seen by us: dcp.load
    writes to what the DTensor detached below autograd, where torch starts another count."""
    local: Any = local_part(parameter)
    assert local is not None
    return local.data_ptr(), parameter._version, local._version, getattr(vars(local).get("weight_gather"), "writes", 0)


@torch.no_grad()
def measure(gathers: Sequence[WeightGather], only_if_stale: bool = False) -> None:
    """The scales of these weights, from what they are now. Collective: one all-reduce MAX a mesh.

    By rows there is nothing to do. Weights that are not sharded yet are left out.
    only_if_stale: the others have the same scale again, which a backward may be about to read: written uncounted.
    """
    together: dict[Any, list[tuple[WeightGather, Any]]] = {}
    for gather in gathers:
        parameter: Any = gather.sharded()
        if parameter is not None and not gather.by_row and not parameter.is_meta:
            dims = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            together.setdefault((parameter.device_mesh, tuple(dims), gather.cast), []).append((gather, parameter))
    for (mesh, dims, cast), alike in together.items():
        amax = _amaxes([local_part(parameter) for _, parameter in alike], alike[0][0].scale.device)
        for dim in dims:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
        scale = scale_from_amax(amax, cast.dtype, cast.power_of_two)
        counted = [not only_if_stale or gather.is_stale(parameter) for gather, parameter in alike]
        for name, new in (("scale", scale), ("unscale", scale.reciprocal())):
            old = [getattr(gather, name) for gather, _ in alike]
            copy_all([t if counts else t.data for t, counts in zip(old, counted, strict=True)], list(new.unbind()))
        for gather, parameter in alike:
            gather.take(parameter)
            gather.model.measured = gather.model.writes


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """The scales of all weights of the model that FSDP2 gathers in float8: one batched amax, one all-reduce a mesh.

    Needless after a step of a `torch.optim.Optimizer`, which is followed by it anyway, and after writes that torch
    counts (`copy_`, checkpoints), which the next gather notices. Needed after others: to `weight.data`, or by fused
    kernels of an optimizer of another kind. Collective: all ranks must call it. The name is torchao's. Does nothing
    where no weight is gathered in float8.
    """
    found = [vars(layer).get("gather") for layer in module.modules()]
    gathers = list(dict.fromkeys(gather for gather in found if isinstance(gather, WeightGather)))
    for gather in gathers:
        gather.note_sharded()
    measure(gathers)


def _amaxes(shards: Sequence[Any], device: torch.device) -> Tensor:
    """This rank's amaxes; 0 of an empty shard, NaN as inf, which MAX can't lose."""
    held = {number: shard for number, shard in enumerate(shards) if shard.numel()}
    largest = dict(zip(held, foreach_amax(list(held.values())), strict=True)) if held else {}
    zero = torch.zeros((), device=shards[0].device)
    amax = torch.stack([largest.get(number, zero) for number in range(len(shards))]).to(device)
    return torch.where(amax.isnan(), torch.inf, amax)


def _after_step(stepped: set[int], _: Tensor | None) -> None:
    """An optimizer has stepped: the weights that it holds have other scales."""
    measure([gather for gather in list(_alive.values()) if id(gather.sharded()) in stepped])


def measure_stale(gather: WeightGather) -> None:
    """Before a gather: where this weight or another of its model was written to, measure all of the model.

    All, and of this model only, so that ranks agree on the one all-reduce: a rank with an empty shard hears of no write
    to it (dcp.load), and a dropped model may be alive on some ranks only, until garbage is collected there.
    """
    if (parameter := gather.sharded()) is None or gather.by_row:
        return
    if gather.model.writes != gather.model.measured or gather.is_stale(parameter):
        family = [other for other in list(_alive.values()) if other.model is gather.model]
        for other in family:
            other.note_sharded()
        measure([other for other in family if other.scale.device == gather.scale.device], only_if_stale=True)


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
