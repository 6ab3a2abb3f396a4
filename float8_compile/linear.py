"""Float8Linear: `nn.Linear` whose three GEMMs run in float8. A whole step:

    forward     cast x, cast w                 output      = x @ w.T + bias
    backward    cast g                         grad_input  = g @ w
                                               grad_weight = g.T @ x

Each operand is cast once, unless its other GEMM wants another cast (`rowwise`: one scale per row of what is
contracted, which is another axis there). Of the input, backward keeps the float8 cast where it serves both GEMMs,
else the input; of the weight the float8 cast, or it casts again, as `recompute_weight_cast` says (recompute.py).
Shapes: M tokens, K in_features, N out_features, as in gemm.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8_compile import gemm
from float8_compile.cast import saturating_cast
from float8_compile.collectives import GatherTokens, gather_operand, gather_tokens, sum_over
from float8_compile.delayed import DelayedScale, cast_with
from float8_compile.delayed_step import give_scales
from float8_compile.gathered_weight import high_precision
from float8_compile.gradient_slice import GradientSlice, slice_of
from float8_compile.layer_scales import ScaledLinear
from float8_compile.recipe import HIGH_PRECISION, Gemm, Recipe
from float8_compile.recompute import cast_weight, gathered_weight
from float8_compile.split import Exchange, ways_split
from float8_compile.tensor import Float8Tensor, Operand, dequantized
from float8_compile.torch_internals import apply_function, is_nested_transform, transforms_are_active

_PLAIN = Gemm(HIGH_PRECISION, HIGH_PRECISION)
_HIGH_PRECISION = Recipe(_PLAIN, _PLAIN, _PLAIN, name="high precision")
HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Float8Linear(ScaledLinear):
    """`nn.Linear` in float8: the same parameters, arguments and gradients, other arithmetic.

    Made from a live `nn.Linear` by `convert_to_float8_training`, or built like one, with a recipe.

    recipe: how each operand is cast; may be replaced by another recipe at any time.
    input_scale, grad_output_scale, weight_scale: the state of delayed scales (delayed.py), else None. It moves in
        training with gradients enabled; in `eval()` or under `no_grad` scales are used and amaxes are not recorded. In
        `eval()` a weight's scale is dynamic.
    recompute_weight_cast: True casts the weight again in backward, False keeps the float8 weight (N·K bytes).
        Settable at any time; costs one recompilation.
    enabled: False runs the layer in high precision (see `float8_disabled`).
    fqn: the layer's name in the model that was converted, for messages.
    calibrating: record amaxes in any mode (see `calibrate`).
    """

    recompute_weight_cast: bool
    enabled: bool
    fqn: str
    calibrating: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "tensorwise",
        recompute_weight_cast: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_name(recipe)
        become_float8([self], [recipe], [recompute_weight_cast], [""])

    def become_plain(self) -> None:
        """Become an `nn.Linear` again, the same object."""
        if self.gather is not None:
            self.gather.release(self)
        self.hold(None)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        for name in _ATTRIBUTES:
            delattr(self, name)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), of the input's dtype, or of autocast's where that is on.

        Raises TypeError for a dtype other than bfloat16, float16 and float32, ValueError for a last dimension
        other than K.
        """
        w_NK, bias, split = *self._local_parameters(), self.split
        if not self.enabled and split is None:
            return nn.functional.linear(input, high_precision(w_NK), bias)
        self._check(input, w_NK.shape[1])
        device = input.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        x = input.to(torch.get_autocast_dtype(device)) if autocast else input
        x_MK = x if x.dim() == 2 else x.reshape(-1, w_NK.shape[1])
        records = self.calibrating or (self.training and torch.is_grad_enabled())
        recipe = self._recipe if self.enabled else _HIGH_PRECISION
        sums_x_grad = split is not None and split.axis == 0 and not isinstance(x, Float8Tensor)
        blocks = 1 if split is None else split.blocks(x)
        gathers_x = split is not None and split.gathers_input
        if split is not None and gathers_x and not recipe.reads_input_in_float8:
            x_MK, gathers_x, sums_x_grad = GatherTokens.apply(x_MK, split.group, blocks), False, False
        with torch.no_grad():
            of_x = ways_split(split)[0]
            x8 = cast_with(x_MK, recipe.output.left, self.input_scale, record=records, across=of_x)
            if split is not None and gathers_x:
                x8 = gather_operand(x8, split.group, blocks)
        w8, kept_w8, kept_as_it_is = self._cast_weight(w_NK, recipe, read_by_backward=x.requires_grad)
        keeps_w8 = kept_w8 is w8
        other_w8 = None if keeps_w8 else kept_w8
        weight_scale = self.weight_scale if self.training else None
        exchange = None if split is None else Exchange(split, blocks, gathers_x, sums_x_grad)
        state = _State(self.input_scale, self.grad_output_scale, weight_scale, records, slice_of(w_NK), exchange)
        operands = *_float8(x8), *_float8(w8), *_float8(other_w8, w8)
        y_MN = apply_function(_Linear, x_MK, w_NK, bias, *operands, keeps_w8, kept_as_it_is, recipe, state)
        if x.dim() == 2:
            return y_MN
        tokens = list(x.shape[:-1])
        if split is not None and split.tokens is not None:
            tokens[split.tokens] = -1
        return y_MN.view(*tokens, y_MN.shape[-1])

    def _cast_weight(
        self, w_NK: Tensor, recipe: Recipe, read_by_backward: bool
    ) -> tuple[Operand, Operand | None, bool]:
        """The weight as `output` multiplies it, what backward is handed, and whether that is kept as it is."""
        of_w = ways_split(self.split)[1]
        # A transform allows no write to the buffers, and compiled it loses what backward saves of them.
        cached = self.cached_weight if self.training and not transforms_are_active() else None
        if cached is not None and cached.holds(w_NK):
            # Alive anyway, and as backward reads it if a copy of that may be kept.
            return *cached.operands(), True
        if self.gather is not None and recipe.output.is_float8:
            w8 = self.gather.operand(self._gathered(w_NK))
            w8, kept_w8 = gathered_weight(w_NK, w8, recipe, self.recompute_weight_cast, read_by_backward, of_w)
            return w8, kept_w8, self.recompute_weight_cast  # FSDP2's buffer, empty between forward and backward
        # In eval the weights may be another's (an average, a checkpoint copied in): no optimizer step would tell.
        delayed = self.weight_scale if self.training else None
        return *cast_weight(w_NK, recipe, self.recompute_weight_cast, read_by_backward, delayed, of_w), False

    def _local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the weight and of the bias, where tensor parallelism has split them."""
        if self.split is None:
            return self.weight, self.bias
        weight: Any = self.weight
        bias: Any = self.bias
        return weight.to_local(), None if bias is None else bias.to_local()

    def _check(self, x: Tensor, in_features: int) -> None:
        if x.is_cuda and not torch.compiler.is_compiling():
            _warn_eager()
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"{self._name()}: the input is {x.dtype}, but float8 GEMMs give bfloat16, float16 or float32; "
                "cast the input, or leave this layer out with module_filter_fn"
            )
        if x.dim() == 0 or x.shape[-1] != in_features:
            last = x.shape[-1] if x.dim() else "missing"
            raise ValueError(
                f"{self._name()}: the input's last dimension is {last} in {tuple(x.shape)}, "
                f"but in_features is {in_features}"
            )

    def _gathered(self, weight: Tensor) -> Float8Tensor:
        if isinstance(weight, Float8Tensor):
            return weight
        raise RuntimeError(
            f"{self._name()}: its recipe has fsdp_float8_all_gather=True, but FSDP2 has not gathered its weight, which "
            f"is a {type(weight).__name__}: call fully_shard on the converted model, or on what holds this layer; in "
            "one process, under DDP or FSDP1 leave fsdp_float8_all_gather=False"
        )

    def _name(self) -> str:
        return f"Float8Linear {self.fqn!r}" if self.fqn else "Float8Linear"

    def extra_repr(self) -> str:
        kept = "" if self.recompute_weight_cast else ", recompute_weight_cast=False"
        return f"{super().extra_repr()}, recipe={self.recipe}{kept}{'' if self.enabled else ', disabled'}"


_ATTRIBUTES = (
    "_recipe",
    "recompute_weight_cast",
    "enabled",
    "fqn",
    "calibrating",
    "input_scale",
    "grad_output_scale",
    "weight_scale",
    "cached_weight",
    "gather",
    "split",
)


def become_float8(
    linears: Sequence[nn.Linear], recipes: Sequence[Recipe], recompute: Sequence[bool], fqns: Sequence[str]
) -> None:
    """Turn live linears into `Float8Linear`s, all at once, so that those with equal settings share their state's
    vectors. The objects and their parameters stay the same."""
    for linear, recipe, recompute_weight_cast, fqn in zip(linears, recipes, recompute, fqns, strict=True):
        if not isinstance(linear, Float8Linear):
            linear.__class__ = Float8Linear  # type: ignore[assignment]
            assert isinstance(linear, Float8Linear)
        linear._recipe, linear.fqn = recipe, fqn
        linear.recompute_weight_cast, linear.enabled, linear.calibrating = recompute_weight_cast, True, False
        vars(linear).setdefault("gather", None)
        vars(linear).setdefault("split", None)
        linear.have_gathered(recipe)
        if (cached := vars(linear).setdefault("cached_weight", None)) is not None:
            cached.fit(recipe)
    give_scales(linears, recipes)


class _Linear(torch.autograd.Function):
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
        state: _State,
    ) -> Tensor:
        x8 = Operand(x_MK) if x_payload is None else Operand(x_payload, x_scale, x_unscale)
        w8 = Operand(w_NK) if w_payload is None else Operand(w_payload, w_scale, w_unscale)
        y_MN = gemm.output(x8, w8, x_MK.dtype, fast_accum=recipe.output.fast_accum, emulate=recipe.emulate)
        if state.exchange is not None:
            y_MN = state.exchange.output(y_MN)
        return y_MN if bias is None else y_MN + bias.to(y_MN.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_MK, w_NK, bias, *operands, keeps_w8, kept_as_it_is, recipe, state = inputs
        x8, w8, other_w8 = Operand(*operands[:3]), Operand(*operands[3:6]), Operand(*operands[6:])
        ctx.recipe, ctx.state, ctx.x_dtype, ctx.w_dtype = recipe, state, x_MK.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept = w8 if keeps_w8 else other_w8
        ctx.casts_w_again = kept.payload is None
        x_saved = (x8.payload, x8.unscale) if recipe.casts_input_once else (x_MK, None)
        if not recipe.casts_input_once and state.exchange is not None and state.exchange.gathers_x:
            x_saved = x8.payload, x8.scale  # x_MK are this rank's tokens only
        w_saved: tuple[Tensor | None, ...]
        if not ctx.casts_w_again:
            payload = kept.payload if kept_as_it_is else gemm.stored_transposed(kept.payload)
            w_saved = payload, None, w8.unscale if kept.unscale is None else kept.unscale
        elif recipe.casts_weight_once:  # with forward's scale: a weight's amax is taken once a step
            w_saved = w_NK, w8.scale, w8.unscale
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
        recipe, state, emulate = ctx.recipe, ctx.state, ctx.recipe.emulate
        x_needs_grad, w_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        x_grad = w_grad = bias_grad = g8 = None
        exchange = state.exchange
        of_x, of_w, of_g = ways_split(None if exchange is None else exchange.split)
        own_g_MN = g_MN
        if exchange is not None and exchange.split.gathers_gradient:
            if recipe.reads_gradient_in_float8:
                g8 = cast_with(g_MN, recipe.grad_input.left, state.grad_output, record=state.records, across=of_g)
                g8 = gather_operand(g8, exchange.split.group, exchange.blocks)
                assert g8.scale is not None
                g_MN = dequantized(g8.payload, g8.scale, g_MN.dtype)
            else:
                g_MN = gather_tokens(g_MN, exchange.split.group, exchange.blocks)
            of_g = None
        if x_needs_grad:
            how = recipe.grad_input
            if g8 is None:
                g8 = cast_with(g_MN, how.left, state.grad_output, record=state.records, across=of_g)
            if not ctx.casts_w_again:
                w8 = Operand(w_saved, None, w_unscale)
            elif recipe.casts_weight_once:
                payload = saturating_cast(w_saved, w_scale, how.right.dtype, foreign=how.right.is_delayed)
                w8 = Operand(payload, w_scale, w_unscale)
            else:
                w8 = cast_with(w_saved, how.right, state.weight, axis=0, across=of_w)
            x_grad = gemm.grad_input(g8, w8, ctx.x_dtype, fast_accum=how.fast_accum, emulate=emulate)
            if exchange is not None:
                x_grad = exchange.input_gradient(x_grad)
        if w_needs_grad:
            how = recipe.grad_weight
            if g8 is None or not recipe.casts_gradient_once:
                g8 = cast_with(g_MN, how.left, state.grad_output, axis=0, record=state.records, across=of_g)
            if recipe.casts_input_once:
                x8 = Operand(x_saved, None, x_unscale)
            else:
                if exchange is not None and exchange.gathers_x:
                    x_saved, of_x = dequantized(x_saved, x_unscale, ctx.x_dtype), None
                x8 = cast_with(x_saved, how.right, state.input, axis=0, record=state.records, across=of_x)
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
            if exchange is not None and exchange.split.gathers_gradient:
                bias_grad = sum_over(bias_grad, exchange.split.group)
            bias_grad = bias_grad.to(ctx.bias_dtype)
        return x_grad, w_grad, bias_grad, *[None] * 13

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "vmap over a Float8Linear is not supported, since a scale belongs to a whole batch: "
            "use float8_disabled(model), or call the layer on the batched tensor"
        )


class _State(NamedTuple):
    """A layer's delayed scales by role, whether this call records amaxes in them, where its weight's gradient goes, and
    what it exchanges with other ranks."""

    input: DelayedScale | None
    grad_output: DelayedScale | None
    weight: DelayedScale | None
    records: bool
    weight_gradient: GradientSlice | None
    exchange: Exchange | None


def _float8(
    operand: Operand | None, other: Operand | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The parts of a float8 operand. None for what is another argument: Dynamo takes no tensor twice into one Function.
    That is a high-precision operand, and a scale of the other cast of the same weight."""
    if operand is None or operand.scale is None:
        return None, None, None
    return (operand.payload, None, None) if other is not None and operand.scale is other.scale else operand


@cache
def _warn_eager() -> None:
    warnings.warn(
        "a Float8Linear runs eagerly on a GPU: its casts are then separate kernels and it is slower than nn.Linear. "
        "Wrap the model in torch.compile.",
        stacklevel=4,
    )
