"""Tensor and sequence parallel linears in float8: torch's parallel styles, with activations gathered as bytes.

Parameters are DTensors, as torch's styles make them, so that optimizers, checkpoints and FSDP2 find what they know.
What a `Float8Linear` multiplies is this rank's part of them, and what it exchanges with other ranks it exchanges
itself, in forward and backward, between casts and GEMMs: split.py. Here is how its input comes and its output goes.

A tensor is gathered in high precision where a GEMM that reads it is: recipe `rowwise_with_gw_hp`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from float8_compile.collectives import gather_operand, scatter_sum
from float8_compile.delayed import cast_with
from float8_compile.linear import Float8Linear, autocast_input
from float8_compile.split import Split, unflattened, ways_split
from float8_compile.tensor import Float8Tensor
from float8_compile.torch_internals import local_part, not_compiled_by_itself

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a `Float8Linear`; where its input is split over tokens, it is gathered in float8.

    Arguments as in torch's. Raises TypeError for another module: convert first.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tokens = _tokens_of(self.input_layouts[0], "input_layouts")
        return _split(self, _float8_linear(module, self), device_mesh, 0, tokens)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a `Float8Linear`; where its output is split over tokens, gradients are gathered in float8.

    Arguments as in torch's. Raises TypeError for another module: convert first.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tokens = _tokens_of(self.output_layouts[0], "output_layouts")
        return _split(self, _float8_linear(module, self), device_mesh, 1, tokens)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts and gathers an input in float8, once for all layers that read it.

    Arguments as in torch's, and two of torchao's: `float8_dtype` (only `torch.float8_e4m3fn`), and
    `fwd_config_submodule_fqn`, the Float8Linear whose recipe says how to cast (without it all of the module's must cast
    their inputs alike). A delayed scale is that layer's: give the others the same, `k.input_scale = q.input_scale`.

    Raises ValueError where the module has no Float8Linear, or several that cast otherwise, NotImplementedError for
    another dtype.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        if float8_dtype is not torch.float8_e4m3fn:
            raise NotImplementedError(f"float8_dtype={float8_dtype}: inputs are cast to torch.float8_e4m3fn")
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self.layer: Float8Linear | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.layer = self._layer_of(module)

        def as_replicated(x: Tensor) -> Tensor:
            return _AsReplicated.apply(x, device_mesh)

        self.as_replicated = torch.compiler.allow_in_graph(as_replicated)
        torch.compiler.allow_in_graph(_in_place_of)

        def prepare(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._prepare_input_kwarg_fn(inputs, kwargs, device_mesh)

        not_compiled_by_itself(prepare)
        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _layer_of(self, module: nn.Module) -> Float8Linear:
        if self.fwd_config_submodule_fqn is not None:
            return _float8_linear(module.get_submodule(self.fwd_config_submodule_fqn), self)
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Float8Linear)}
        casts = {(layer.recipe.output.left, layer.recipe.grad_weight.right) for layer in layers.values()}
        if len(casts) != 1:
            found = ", ".join(f"{name}: {layer.recipe}" for name, layer in layers.items()) or "no Float8Linear"
            raise ValueError(
                f"PrepareFloat8ModuleInput of a {type(module).__name__} needs one way to cast its input, and there is "
                f"{found}: convert first, or name a layer by fwd_config_submodule_fqn"
            )
        return next(iter(layers.values()))

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        assert self.layer is not None
        gathers = isinstance(input_layout, Shard) and isinstance(desired_layout, Replicate)
        if not (gathers and self.layer.enabled and self.layer.recipe.reads_input_in_float8):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        assert isinstance(input_layout, Shard)
        x = input.to_local() if isinstance(input, DTensor) else input
        gathered = _gathered_input(self.layer, x, input_layout.dim, mesh.get_group())
        return gathered if self.use_local_output else self.as_replicated(gathered)


def _float8_linear(module: nn.Module, style: object) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise TypeError(
            f"{type(style).__name__} is for a Float8Linear, and this is a {type(module).__name__}: call "
            "convert_to_float8_training first, or use torch's style without Float8 in its name"
        )
    return module


def _split(
    style: ColwiseParallel | RowwiseParallel, layer: Float8Linear, mesh: DeviceMesh, axis: int, tokens: int | None
) -> Float8Linear:
    """The layer, its parameters split as torch's style does, along this axis of the weight, with hooks around it."""
    given, wanted = style.input_layouts[0], style.output_layouts[0]
    distribute_module(layer, mesh, style._partition_linear_fn)
    layer.split = Split(axis, mesh.get_group(), tokens)
    layer.register_forward_pre_hook(partial(_local_input, mesh, given, axis == 1))
    has = wanted if axis == 1 else None
    layer.register_forward_hook(partial(_output, mesh, has, wanted, style.use_local_output))
    return layer


def _tokens_of(layout: Placement, of: str) -> int | None:
    """The axis that a layout splits, or None where each rank has everything."""
    if isinstance(layout, Shard):
        if layout.dim < 0:
            raise ValueError(f"{of}={layout!r}: count the axis of the tokens from the front, such as Shard(1)")
        return layout.dim
    if layout.is_replicate():
        return None
    raise ValueError(f"{of}={layout!r}: expected Replicate(), or Shard(axis) of the tokens")


def _local_input(
    mesh: DeviceMesh, layout: Placement, features: bool, layer: Float8Linear, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What the rank has of the input, in the layout that the style was given; features: split along the last axis."""
    x, *others = inputs
    wanted = Shard(x.dim() - 1) if features else layout
    if not isinstance(x, DTensor):
        if not features or layout in (wanted, Shard(-1)):
            return inputs
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    if x.placements[0] != wanted:
        x = x.redistribute(placements=[wanted])
    # Of what PrepareFloat8ModuleInput gathered, each layer that reads it has a part of the gradient.
    is_part = isinstance(local_part(x), Float8Tensor)
    return x.to_local(grad_placements=[Partial() if is_part else wanted]), *others


def _output(
    mesh: DeviceMesh,
    has: Placement | None,
    layout: Placement,
    use_local_output: bool,
    layer: Float8Linear,
    inputs: Any,
    y: Tensor,
) -> Tensor:
    """The output in the layout that the style was given. has: the one that it has; None: split along the last axis."""
    has = Shard(y.dim() - 1) if has is None else has
    if use_local_output and layout in (has, Shard(has.dim - y.dim()) if isinstance(has, Shard) else has):
        return y
    split = DTensor.from_local(y, mesh, [has], run_check=False)
    if layout != has:
        split = split.redistribute(placements=[layout])
    return split.to_local() if use_local_output else split


def _gathered_input(layer: Float8Linear, x: Tensor, tokens: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """The cast of x (..., tokens, ..., K) from all ranks, as a colwise layer would make it of its input."""
    x, split, records = autocast_input(x), Split(0, group, tokens), layer.records_amaxes()
    x_MK, blocks = x.reshape(-1, x.shape[-1]), split.blocks(x)
    with torch.no_grad():
        of_x = ways_split(split)[0]
        x8 = cast_with(x_MK, layer.recipe.output.left, layer.input_scale, record=records, across=of_x)
        payload, scale, _ = gather_operand(x8, group, blocks)
        assert scale is not None
    return unflattened(_in_place_of(x_MK, payload, scale, group.group_name, blocks), x, tokens)


def _in_place_of(x_MK: Tensor, payload: Tensor, scale: Tensor, group: str, blocks: int) -> Tensor:
    """The gathered cast as a Float8Tensor whose gradient is x's.

    In a graph one node: Dynamo would trace a backward that gets a Float8Tensor too, and what it gets is a plain one.
    """
    return _Gathered.apply(x_MK, payload, scale, group, blocks)


class _Gathered(torch.autograd.Function):
    """The Float8Tensor of gathered casts, in the place of all ranks' x; its gradient is summed over them and split."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_MK: Tensor,
        payload: Tensor,
        scale: Tensor,
        group: str,
        blocks: int,
    ) -> Tensor:
        ctx.group, ctx.blocks = group, blocks
        return Float8Tensor(payload, scale, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return scatter_sum(gradient, ctx.group, ctx.blocks), None, None, None, None


class _AsReplicated(torch.autograd.Function):
    """The DTensor of what each rank has whole, whose gradient is a part of a sum.

    DTensor.from_local would sum it up on each rank, and the gather's backward again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.redistribute(placements=[Partial()]).to_local(), None
