"""Float8Linear: `nn.Linear` whose three GEMMs run in float8. A whole step:

    forward     cast x, cast w                 output      = x @ w.T + bias
    backward    cast g                         grad_input  = g @ w
                                               grad_weight = g.T @ x

Each operand is cast once, unless its other GEMM wants another cast (`rowwise`: one scale per row of what is
contracted, which is another axis there). Backward keeps the float8 input; of the weight it keeps the float8
cast or casts again, as `recompute_weight_cast` says (recompute.py).
Shapes: M tokens, K in_features, N out_features, as in gemm.py.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile import gemm
from float8_compile.cast import cast, saturating_cast
from float8_compile.recipe import Recipe
from float8_compile.recompute import backward_reads_cast, cast_weight, needed_in_forward
from float8_compile.tensor import Float8Tensor
from float8_compile.torch_internals import apply_function

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
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        self._check(x)
        x_MK = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        w_NK, recipe = self.weight, self.recipe
        recompute = self.recompute_weight_cast
        keeps_w8 = torch.is_grad_enabled() and x.requires_grad and backward_reads_cast(recompute)
        with torch.no_grad():
            x8 = cast(x_MK, recipe.output.left)
        w8 = cast_weight(w_NK, recipe.output.right, recompute or not recipe.casts_weight_once)
        other_w8 = None  # the weight as grad_input wants it, where that is another cast
        if keeps_w8 and not recipe.casts_weight_once:
            other_w8 = cast_weight(w_NK, recipe.grad_input.right, recompute, axis=0)
            w8 = w8 if recompute else needed_in_forward(w8, other_w8)
        y_MN = apply_function(
            _Linear, x_MK, w_NK, self.bias, *_parts(x8), *_parts(w8), *_parts(other_w8), keeps_w8, recipe
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
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._name()}: the input's last dimension is {x.shape[-1]} in {tuple(x.shape)}, "
                f"but in_features is {self.in_features}"
            )

    def _name(self) -> str:
        return f"Float8Linear {self.fqn!r}" if self.fqn else "Float8Linear"

    def extra_repr(self) -> str:
        kept = "" if self.recompute_weight_cast else ", recompute_weight_cast=False"
        return f"{super().extra_repr()}, recipe={self.recipe}{kept}{'' if self.enabled else ', disabled'}"


class _Linear(torch.autograd.Function):
    """The three GEMMs. Forward gets x and w in high precision, which gradients belong to, and cast, which it

    multiplies. A Float8Tensor comes as its two parts and only plain tensors are saved, through
    `save_for_backward`: a tensor left on ctx outlives backward (the GEMM that leaked, MS-AMP).
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
        other_w_payload: Tensor | None,
        other_w_scale: Tensor | None,
        keeps_w8: bool,
        recipe: Recipe,
    ) -> Tensor:
        x8, w8 = _whole(x_payload, x_scale, x_MK), _whole(w_payload, w_scale, w_NK)
        y_MN = gemm.output(x8, w8, x_MK.dtype, fast_accum=recipe.output.fast_accum, emulate=recipe.emulate)
        return y_MN if bias is None else y_MN + bias.to(y_MN.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_MK, w_NK, bias, *x8, w_payload, w_scale, other_w_payload, other_w_scale, keeps_w8, recipe = inputs
        ctx.recipe, ctx.x_dtype, ctx.w_dtype = recipe, x_MK.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x_saved = x8 if recipe.casts_input_once else (x_MK, None)
        w_saved = (w_payload, w_scale) if recipe.casts_weight_once else (other_w_payload, other_w_scale)
        ctx.keeps_w8 = keeps_w8 and w_saved[0] is not None
        if not ctx.keeps_w8:
            w_saved = (w_NK, w_scale)
        x_needs_grad, w_needs_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(x_saved if w_needs_grad else (None, None)), *(w_saved if x_needs_grad else (None, None))
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_saved, x_scale, w_saved, w_scale = ctx.saved_tensors
        recipe, emulate = ctx.recipe, ctx.recipe.emulate
        x_needs_grad, w_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        x_grad = w_grad = bias_grad = g8 = None
        w8: Tensor
        x8: Tensor
        if x_needs_grad:
            how = recipe.grad_input
            g8 = cast(g_MN, how.left)
            if ctx.keeps_w8:
                w8 = Float8Tensor(w_saved, w_scale, ctx.w_dtype)
            elif recipe.casts_weight_once:  # with forward's scale: a weight's amax is taken once a step
                w8 = Float8Tensor(saturating_cast(w_saved, w_scale, how.right.dtype), w_scale, ctx.w_dtype)
            else:
                w8 = cast(w_saved, how.right, axis=0)
            x_grad = gemm.grad_input(g8, w8, ctx.x_dtype, fast_accum=how.fast_accum, emulate=emulate)
        if w_needs_grad:
            how = recipe.grad_weight
            if g8 is None or not recipe.casts_gradient_once:
                g8 = cast(g_MN, how.left, axis=0)
            x8 = Float8Tensor(x_saved, x_scale, ctx.x_dtype) if recipe.casts_input_once else cast(x_saved, how.right, 0)
            w_grad = gemm.grad_weight(g8, x8, ctx.w_dtype, fast_accum=how.fast_accum, emulate=emulate)
        if bias_needs_grad:
            bias_grad = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return x_grad, w_grad, bias_grad, *[None] * 8

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "vmap over a Float8Linear is not supported, since a scale belongs to a whole batch: "
            "use float8_disabled(model), or call the layer on the batched tensor"
        )


def _parts(t: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (t.payload, t.scale) if isinstance(t, Float8Tensor) else (None, None)


def _whole(payload: Tensor | None, scale: Tensor | None, high_precision: Tensor) -> Tensor:
    if payload is None or scale is None:
        return high_precision
    return Float8Tensor(payload, scale, high_precision.dtype)


@cache
def _warn_eager() -> None:
    warnings.warn(
        "a Float8Linear runs eagerly on a GPU: its casts are then separate kernels and it is slower than nn.Linear. "
        "Wrap the model in torch.compile.",
        stacklevel=4,
    )
