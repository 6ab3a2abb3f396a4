"""The scales of weights that FSDP2 gathers in float8, and what a rank sends. How FSDP2 asks: gathered_weight.py.

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
from float8_compile.cast import batched_amax, saturating_cast, scale_from_amax, tensor_amax
from float8_compile.collectives import largest_of_all
from float8_compile.recipe import Cast
from float8_compile.split import Across, shared_amax
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import copy_all, local_part, mark_static_address

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
        self.allocate(layer.weight.device)
        _alive[next(_numbers)] = self
        listen(_after_step)

    def allocate(self, device: torch.device) -> None:
        """Scales on this device, that the next gather measures."""
        # Ones, which nothing reads.
        self.scale, self.unscale = (mark_static_address(torch.ones((), device=device)) for _ in range(2))
        self._measured = None

    @property
    def by_row(self) -> bool:
        """Whether each row of the weight has a scale of its own."""
        return self.cast.granularity == "row"

    def sharded(self) -> Tensor | None:
        """The sharded parameter, which the optimizer has, also while the layer holds the gathered one."""
        return None if self._sharded is None else self._sharded()

    def note_sharded(self) -> None:
        """Called where the layer is known to hold the sharded parameter."""
        layer = self._layer()
        # Not any DTensor: where tensor parallelism has split it too, the gathered one is one as well.
        if layer is not None and self.is_sharded and hasattr(local_part(layer.weight), "fsdp_pre_all_gather"):
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
        amax = tensor_amax(shard, "row")
        parameter: Any = self.sharded()
        for dim, placement in enumerate(parameter.placements):
            if getattr(placement, "dim", 0) == 1:  # rows are split
                group = parameter.device_mesh.get_group(dim)
                if group is mesh.get_group():
                    raise NotImplementedError("FSDP2 shards axis 1, so that no rank has whole rows to scale")
                amax = shared_amax(amax, self.cast, 1, Across(1, group))
        return amax


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
        amax = batched_amax([local_part(parameter) for _, parameter in alike], alike[0][0].scale.device)
        for dim in dims:
            amax = largest_of_all(amax, mesh.get_group(dim))
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
