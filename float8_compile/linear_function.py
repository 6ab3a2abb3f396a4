"""The three GEMMs of a linear layer and their gradients: the one autograd.Function between a layer and autograd.

    forward     multiply x and w, cast already        output      = x @ w.T + bias
    backward    cast g; x and w, if forward's cast    grad_input  = g @ w
                is no use for the other GEMM          grad_weight = g.T @ x

Where tensor parallelism has split the weight, what ranks exchange goes between casts and GEMMs (split.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8_compile import gemm
from float8_compile.cast import saturating_cast
from float8_compile.collectives import gather_operand, gather_tokens, sum_over
from float8_compile.delayed import DelayedScale, cast_with
from float8_compile.gradient_slice import GradientSlice
from float8_compile.operand_statistics import LayerStatistics
from float8_compile.recipe import Recipe
from float8_compile.split import Exchange, ways_split
from float8_compile.tensor import Float8Tensor, Operand, dequantized
from float8_compile.torch_internals import is_nested_transform


class Float8LinearFunction(torch.autograd.Function):
    """The three GEMMs. Forward gets x and w in high precision, to which gradients belong, and cast, to multiply.

    Operands come in parts and only plain tensors are saved, through `save_for_backward`: a tensor left on ctx
    outlives backward (the GEMM that leaked, MS-AMP).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        x_MK: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        x_payload: Tensor | None,
        x_scale: Tensor | None,
        x_unscale: Tensor | None,
        w_payload: Tensor | None,
        w_scale: Tensor | None,
        w_unscale: Tensor | None,
        other_payload: Tensor | None,
        other_scale: Tensor | None,
        other_unscale: Tensor | None,
        keeps_w8: bool,
        kept_as_it_is: bool,
        recipe: Recipe,
        state: State,
    ) -> Tensor:
        x8 = Operand(x_MK) if x_payload is None else Operand(x_payload, x_scale, x_unscale)
        w8 = Operand(w_NK) if w_payload is None else Operand(w_payload, w_scale, w_unscale)
        how, gathered = recipe.output, state.exchange is not None and state.exchange.reads_gathered_x
        options = {"fast_accum": how.fast_accum, "emulate": recipe.emulate, "in_memory": gathered}
        y_MN = gemm.output(x8, w8, x_MK.dtype, **options)
        if state.exchange is not None:
            y_MN = state.exchange.output(y_MN)
        return y_MN if bias is None else y_MN + bias.to(y_MN.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_MK, w_NK, bias, *operands, keeps_w8, kept_as_it_is, recipe, state = inputs
        x_payload, x_scale, x_unscale, w_payload, w_scale, w_unscale, other_payload, _, other_unscale = operands
        ctx.recipe, ctx.state, ctx.x_dtype, ctx.w_dtype = recipe, state, x_MK.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept, kept_unscale = (w_payload, w_unscale) if keeps_w8 else (other_payload, other_unscale)
        ctx.casts_w_again = kept is None
        x_saved = (x_payload, x_unscale) if recipe.casts_input_once else (x_MK, None)
        if not recipe.casts_input_once and state.exchange is not None and state.exchange.gathers_x:
            x_saved = x_payload, x_scale  # x_MK are this rank's tokens only
        w_saved: tuple[Tensor | None, ...]
        if kept is not None:
            payload = kept if kept_as_it_is else gemm.stored_transposed(kept)
            w_saved = payload, None, w_unscale if kept_unscale is None else kept_unscale
        elif recipe.casts_weight_once:  # with forward's scale: a weight's amax is taken once a step
            w_saved = w_NK, w_scale, w_unscale
        else:
            w_saved = w_NK, None, None
        x_needs_grad, w_needs_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(x_saved if w_needs_grad else (None, None)), *(w_saved if x_needs_grad else (None, None, None))
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if is_nested_transform():  # where once_differentiable would give zeros
            raise NotImplementedError("a Float8Linear can't be differentiated twice: use float8_disabled(model)")
        x_saved, x_unscale, w_saved, w_scale, w_unscale = ctx.saved_tensors
        recipe, state, emulate, statistics = ctx.recipe, ctx.state, ctx.recipe.emulate, ctx.state.statistics
        x_needs_grad, w_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        x_grad = w_grad = bias_grad = g8 = None
        exchange = state.exchange
        of_x, of_w, of_g = ways_split(None if exchange is None else exchange.split)
        own_g_MN, gathered = g_MN, exchange is not None and exchange.split.gathers_gradient
        if exchange is not None and gathered:
            if recipe.reads_gradient_in_float8:
                g8 = cast_with(g_MN, recipe.grad_input.left, state.grad_output, record=state.records, across=of_g)
                if statistics is not None:
                    statistics.add("grad_output", g_MN, g8, recipe)
                g8 = gather_operand(g8, exchange.split.group, exchange.blocks)
                if not recipe.casts_gradient_once:  # else nobody reads it
                    assert g8.scale is not None
                    g_MN = dequantized(g8.payload, g8.scale, g_MN.dtype)
            else:
                g_MN = gather_tokens(g_MN, exchange.split.group, exchange.blocks)
            of_g = None
        if x_needs_grad:
            how = recipe.grad_input
            if g8 is None:
                g8 = cast_with(g_MN, how.left, state.grad_output, record=state.records, across=of_g)
                if statistics is not None:
                    statistics.add("grad_output", g_MN, g8, recipe)
            if not ctx.casts_w_again:
                w8 = Operand(w_saved, None, w_unscale)
            elif recipe.casts_weight_once:
                payload = saturating_cast(w_saved, w_scale, how.right.dtype, foreign=how.right.is_delayed)
                w8 = Operand(payload, w_scale, w_unscale)
            else:
                w8 = cast_with(w_saved, how.right, state.weight, axis=0, across=of_w)
                if statistics is not None:
                    statistics.add("weight for grad_input", w_saved, w8, recipe)
            options = {"fast_accum": how.fast_accum, "emulate": emulate, "in_memory": gathered}
            x_grad = gemm.grad_input(g8, w8, ctx.x_dtype, **options)
            if exchange is not None:
                x_grad = exchange.input_gradient(x_grad)
        if w_needs_grad:
            how = recipe.grad_weight
            if g8 is None or not recipe.casts_gradient_once:
                g8 = cast_with(g_MN, how.left, state.grad_output, axis=0, record=state.records, across=of_g)
                if statistics is not None:
                    once = recipe.casts_gradient_once
                    statistics.add("grad_output" if once else "grad_output for grad_weight", g_MN, g8, recipe)
            if recipe.casts_input_once:
                x8 = Operand(x_saved, None, x_unscale)
            else:
                if exchange is not None and exchange.gathers_x:
                    x_saved, of_x = dequantized(x_saved, x_unscale, ctx.x_dtype), None
                x8 = cast_with(x_saved, how.right, state.input, axis=0, record=state.records, across=of_x)
                if statistics is not None:
                    statistics.add("input for grad_weight", x_saved, x8, recipe)
            w_grad = gemm.grad_weight(g8, x8, ctx.w_dtype, fast_accum=how.fast_accum, emulate=emulate)
            if state.weight_gradient is not None:
                state.weight_gradient.add(w_grad)
                w_grad = None
        if bias_needs_grad:
            g_MN = own_g_MN.dequantize() if isinstance(own_g_MN, Float8Tensor) else own_g_MN
            if state.records and state.grad_output is not None and torch.compiler.is_compiling():
                # Never true, but so the sum comes after the amax. As its sibling Inductor would put it into the kernel
                # that casts, whose loop over rows then stores the transposed cast uncoalesced: six times the sectors.
                g_MN = torch.where(state.grad_output.amax < 0, 0.0, g_MN)
            # contiguous: the order of a sum depends on strides, and a compiled backward gets a contiguous gradient
            bias_grad = g_MN.contiguous().sum(0, dtype=torch.float32)
            if exchange is not None and gathered:
                bias_grad = sum_over(bias_grad, exchange.split.group)
            bias_grad = bias_grad.to(ctx.bias_dtype)
        return x_grad, w_grad, bias_grad, *[None] * 13

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "vmap over a Float8Linear is not supported, since a scale belongs to a whole batch: "
            "use float8_disabled(model), or call the layer on the batched tensor"
        )


class State(NamedTuple):
    """A layer's delayed scales by role, whether this call records amaxes in them, where its weight's gradient goes,
    what it exchanges with other ranks, and what its casts add to while it is monitored."""

    input: DelayedScale | None
    grad_output: DelayedScale | None
    weight: DelayedScale | None
    records: bool
    weight_gradient: GradientSlice | None
    exchange: Exchange | None
    statistics: LayerStatistics | None


def parts(operand: Operand | None, other: Operand | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The parts of a float8 operand. None for what is another argument: Dynamo takes no tensor twice into one Function.
    That is a high-precision operand, and a scale of the other cast of the same weight."""
    if operand is None or operand.scale is None:
        return None, None, None
    return (operand.payload, None, None) if other is not None and operand.scale is other.scale else operand
