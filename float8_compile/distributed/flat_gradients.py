"""Flat gradients of an FSDP2 group: added up where the reduce-scatter reads them.

FSDP2 accumulates unsharded gradients in `reduce_dtype`, one tensor a parameter, and copies them for the reduction into
a buffer that has the ranks' shards one after the other:

    rank 0: shard of p1, shard of p2, ... | rank 1: shard of p1, shard of p2, ... | ...     dim 0, padded to equal parts

Here that buffer is what gradients are accumulated into, so the copy, 4 bytes an element of the largest group, and its
traffic are gone. Gradients are bitwise those of FSDP2's own accumulation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer

from float8_compile.flat_gradients import FlatGradients
from float8_compile.gradient_slice import slice_of


class ShardedFlatGradients(FlatGradients):
    """`FlatGradients` of one `fully_shard` group: the parameters of `module` without those of groups inside it.

        groups = [ShardedFlatGradients(module) for module in model.modules() if isinstance(module, FSDPModule)]
        for gradients in groups:
            gradients.attach(optimizer)
        ...                                                    # any number of microbatches
        for gradients in groups:
            gradients.reduce_scatter_()                        # or leave it to optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    FSDP2 finds no gradients left and reduces nothing itself, whatever `set_requires_gradient_sync` says. Make it after
    `fully_shard` and before the first forward; FSDP2's own settings for the reduction (divide factors, custom
    collectives) don't apply: gradients are averaged over the ranks.

    flat: (world size · padded shard sizes,) of dtype, in reduce-scatter order.

    After `reduce_scatter_` every parameter of the group has its shard as `.grad`, zeros where no rank had a gradient.

    Raises TypeError for a module that `fully_shard` was not applied to, ValueError where it manages no parameter that
    requires a gradient, NotImplementedError for HSDP, for other placements than `Shard(0)` on one mesh dimension and
    for parameters with an `fsdp_pre_all_gather`, which gathers something else than the parameter.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        if not isinstance(module, FSDPModule):
            raise TypeError(
                f"ShardedFlatGradients needs a module that fully_shard was applied to, got a {type(module).__name__}; "
                "for parameters that are not sharded there is FlatGradients"
            )
        assert isinstance(module, nn.Module)
        self._places = _places(module)
        parameters = list(self._places)
        if not parameters:
            raise ValueError(f"{type(module).__name__}: no parameter of its own group requires a gradient")
        for parameter in parameters:
            _check(parameter)
        self._mesh = parameters[0].device_mesh  # type: ignore[attr-defined]
        self._ranks = self._mesh.size()
        rows = {p: -(-p.shape[0] // self._ranks) for p in parameters}
        self._numels = [rows[p] * math.prod(p.shape[1:]) for p in parameters]  # of one rank's padded shard
        self._begin(parameters, self._ranks * sum(self._numels), dtype)
        self._reduced = False
        # FSDP2's own hook, which gathers, comes first: it is prepended.
        self._first_forward = module.register_forward_pre_hook(torch.compiler.disable(self._meet_unsharded))

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        """Not defined: a parameter's gradient lies in one part a rank."""
        raise NotImplementedError("gradients lie here in one part a rank: read `.grad` after reduce_scatter_()")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Not defined: a norm is one of reduced gradients, over all groups."""
        raise NotImplementedError(
            "call reduce_scatter_() of every group, then torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
        )

    @torch.no_grad()
    def reduce_scatter_(self) -> None:
        """Average the gradients over the ranks, and give each parameter its shard as `.grad`; twice is once.

        Collective: every rank of the mesh must call it, with the groups in the same order.
        """
        if self._reduced:
            return
        shard = self.flat.new_empty(len(self.flat) // self._ranks)
        group = self._mesh.get_group()
        _reduce_scatter(shard, self.flat, torch.distributed.ReduceOp.AVG, group=group)
        for parameter, part in zip(self._parameters, shard.split(self._numels), strict=True):
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            gradient = part[: local.numel()].view(local.shape).to(parameter.dtype)
            parameter.grad = DTensor.from_local(
                gradient,
                self._mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self._reduced = True

    def remove(self) -> None:
        """Give the parameters back: FSDP2 accumulates and reduces by itself again."""
        self._first_forward.remove()
        super().remove()

    def _meet_unsharded(self, *_: Any) -> None:
        """Give the gathered parameters their parts of the buffer. They stay the same objects from here on."""
        self._first_forward.remove()
        segments = self.flat.view(self._ranks, -1)
        start = 0
        for (owner, name), numel in zip(self._places.values(), self._numels, strict=True):
            unsharded = getattr(owner, name)
            if slice_of(unsharded) is None:
                whole, rest = divmod(unsharded.numel(), max(numel, 1))  # ranks with a full shard; what the next one has
                pieces = [segments[:whole, start : start + numel]]
                if rest:
                    pieces.append(segments[whole, start : start + rest])
                self._give_slice(unsharded, pieces)
            start += numel

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if self._reduced:
            raise RuntimeError(
                f"a gradient of a parameter of shape {tuple(parameter.shape)} came after reduce_scatter_(): call "
                "optimizer.zero_grad() of an attached optimizer, or zero_(), before the next backward"
            )
        self._used.add(parameter)
        if parameter.grad is not None:
            self._slices[parameter].add(parameter.grad)
            parameter.grad = None

    def _hand_over(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reduce_scatter_()

    def _take_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def _zero(self, parameters: list[nn.Parameter], forget: bool = True) -> None:
        self.flat.zero_()
        self._used.clear()
        self._reduced = False


# The name that torch 2.13 gave it, where it has that.
_reduce_scatter = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)


def _places(module: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """The parameters of the module's own group, and the attribute through which forward reads each."""
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    waiting = [module]
    while waiting:
        owner = waiting.pop(0)
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                places.setdefault(parameter, (owner, name))
        waiting += [child for child in owner.children() if not isinstance(child, FSDPModule)]
    return places


def _check(parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is gathered or not sharded: make ShardedFlatGradients "
            "after fully_shard and before the first forward"
        )
    if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
        raise NotImplementedError(
            f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements} on a mesh of "
            f"{parameter.device_mesh.ndim} dimensions: only Shard(0) on one is supported (no HSDP, no tensor parallel)"
        )
    if hasattr(parameter.to_local(), "fsdp_pre_all_gather"):
        raise NotImplementedError(
            f"a parameter of shape {tuple(parameter.shape)} is gathered as something else (fsdp_pre_all_gather), so "
            "its gradients don't come by the gathered parameter: use FSDP2's own accumulation"
        )
