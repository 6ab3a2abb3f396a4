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
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile import gemm
from float8_compile.cast import cast_operand, saturating_cast
from float8_compile.recipe import Recipe
from float8_compile.recompute import cast_weight
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import apply_function, is_nested_transform

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Float8Linear(nn.Linear):
    """`nn.Linear` in float8: the same parameters, arguments and gradients, other arithmetic.

    Made from a live `nn.Linear` by `convert_to_float8_training`, or built like one, with a recipe.

    recipe: how each operand is cast; may be replaced by another recipe at any time.
    recompute_weight_cast: True casts the weight again in backward, False keeps the float8 weight (N·K bytes).
        Settable at any time; costs one recompilation.
    enabled: False runs the layer in high precision (see `float8_disabled`).
    fqn: the layer's name in the model that was converted, for messages.
    """

    recipe: Recipe
    recompute_weight_cast: bool
    enabled: bool
    fqn: str

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
        self.become_float8(recipe if isinstance(recipe, Recipe) else Recipe.from_name(recipe), recompute_weight_cast)

    def become_float8(self, recipe: Recipe, recompute_weight_cast: bool = True, fqn: str = "") -> None:
        """Give a module whose class has just become `Float8Linear` what it needs beside its parameters."""
        self.recipe, self.recompute_weight_cast, self.enabled, self.fqn = recipe, recompute_weight_cast, True, fqn

    def become_plain(self) -> None:
        """Become an `nn.Linear` again, the same object."""
        self.__class__ = nn.Linear  # type: ignore[assignment]
        del self.recipe, self.recompute_weight_cast, self.enabled, self.fqn

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), of the input's dtype, or of autocast's where that is on.

        Raises TypeError for a dtype other than bfloat16, float16 and float32, ValueError for a last dimension
        other than K.
        """
        if not self.enabled:
            return super().forward(input)
        self._check(input)
        device = input.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        x = input.to(torch.get_autocast_dtype(device)) if autocast else input
        x_MK = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        w_NK, recipe = self.weight, self.recipe
        with torch.no_grad():
            x8 = cast_operand(x_MK, recipe.output.left)
        w8, kept_w8 = cast_weight(w_NK, recipe, self.recompute_weight_cast, read_by_backward=x.requires_grad)
        keeps_w8 = kept_w8 is w8
        other_w8 = None if keeps_w8 else kept_w8
        y_MN = apply_function(
            _Linear, x_MK, w_NK, self.bias, *_float8(x8), *_float8(w8), *_float8(other_w8), keeps_w8, recipe
        )
        return y_MN if x.dim() == 2 else y_MN.view(*x.shape[:-1], self.out_features)

    def _check(self, x: Tensor) -> None:
        if x.is_cuda and not torch.compiler.is_compiling():
            _warn_eager()
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"{self._name()}: the input is {x.dtype}, but float8 GEMMs give bfloat16, float16 or float32; "
                "cast the input, or leave this layer out with module_filter_fn"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            last = x.shape[-1] if x.dim() else "missing"
            raise ValueError(
                f"{self._name()}: the input's last dimension is {last} in {tuple(x.shape)}, "
                f"but in_features is {self.in_features}"
            )

    def _name(self) -> str:
        return f"Float8Linear {self.fqn!r}" if self.fqn else "Float8Linear"

    def extra_repr(self) -> str:
        kept = "" if self.recompute_weight_cast else ", recompute_weight_cast=False"
        return f"{super().extra_repr()}, recipe={self.recipe}{kept}{'' if self.enabled else ', disabled'}"


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
        w_payload: Tensor | None,
        w_scale: Tensor | None,
        other_payload: Tensor | None,
        other_scale: Tensor | None,
        keeps_w8: bool,
        recipe: Recipe,
    ) -> Tensor:
        x8 = Operand(x_MK, None) if x_payload is None else Operand(x_payload, x_scale)
        w8 = Operand(w_NK, None) if w_payload is None else Operand(w_payload, w_scale)
        y_MN = gemm.output(x8, w8, x_MK.dtype, fast_accum=recipe.output.fast_accum, emulate=recipe.emulate)
        return y_MN if bias is None else y_MN + bias.to(y_MN.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_MK, w_NK, bias, x_payload, x_scale, w_payload, w_scale, other_payload, other_scale, keeps_w8, recipe = inputs
        ctx.recipe, ctx.x_dtype, ctx.w_dtype = recipe, x_MK.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept = (w_payload, w_scale) if keeps_w8 else (other_payload, other_scale)
        ctx.casts_w_again = kept[0] is None
        x_saved = (x_payload, x_scale) if recipe.casts_input_once else (x_MK, None)
        if ctx.casts_w_again:
            w_saved = (w_NK, w_scale if recipe.casts_weight_once else None)
        else:
            w_saved = (gemm.stored_transposed(kept[0]), kept[1])
        x_needs_grad, w_needs_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(x_saved if w_needs_grad else (None, None)), *(w_saved if x_needs_grad else (None, None))
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if is_nested_transform():  # where once_differentiable would give zeros
            raise NotImplementedError("a Float8Linear can't be differentiated twice: use float8_disabled(model)")
        x_saved, x_scale, w_saved, w_scale = ctx.saved_tensors
        recipe, emulate = ctx.recipe, ctx.recipe.emulate
        x_needs_grad, w_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        x_grad = w_grad = bias_grad = g8 = None
        if x_needs_grad:
            how = recipe.grad_input
            g8 = cast_operand(g_MN, how.left)
            if not ctx.casts_w_again:
                w8 = Operand(w_saved, w_scale)
            elif recipe.casts_weight_once:  # with forward's scale: a weight's amax is taken once a step
                w8 = Operand(saturating_cast(w_saved, w_scale, how.right.dtype), w_scale)
            else:
                w8 = cast_operand(w_saved, how.right, axis=0)
            x_grad = gemm.grad_input(g8, w8, ctx.x_dtype, fast_accum=how.fast_accum, emulate=emulate)
        if w_needs_grad:
            how = recipe.grad_weight
            if g8 is None or not recipe.casts_gradient_once:
                g8 = cast_operand(g_MN, how.left, axis=0)
            x8 = Operand(x_saved, x_scale) if recipe.casts_input_once else cast_operand(x_saved, how.right, axis=0)
            w_grad = gemm.grad_weight(g8, x8, ctx.w_dtype, fast_accum=how.fast_accum, emulate=emulate)
        if bias_needs_grad:
            g_MN = g_MN.dequantize() if isinstance(g_MN, Float8Tensor) else g_MN
            # contiguous: the order of a sum depends on strides, and a compiled backward gets a contiguous gradient
            bias_grad = g_MN.contiguous().sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return x_grad, w_grad, bias_grad, *[None] * 8

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "vmap over a Float8Linear is not supported, since a scale belongs to a whole batch: "
            "use float8_disabled(model), or call the layer on the batched tensor"
        )


def _float8(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    """The parts of a float8 operand. None for high precision: Dynamo takes no tensor twice into one Function."""
    return (None, None) if operand is None or operand.scale is None else (operand.payload, operand.scale)


@cache
def _warn_eager() -> None:
    warnings.warn(
        "a Float8Linear runs eagerly on a GPU: its casts are then separate kernels and it is slower than nn.Linear. "
        "Wrap the model in torch.compile.",
        stacklevel=4,
    )
