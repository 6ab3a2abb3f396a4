"""FrozenLinear: a linear layer for inference, its weight in float8 and every scale a constant.

    output = (cast(x / input_scale) @ weight.T) * input_scale * weight_scale + bias

No amax is taken: one read of x for the cast, then the GEMM. Its tensors have the names and the meaning that vLLM and
compressed-tensors give them in float8 checkpoints with static activation scales: what a scale multiplies is float8, so
it is the reciprocal of `Float8Tensor.scale`.

Under `torch.onnx.export` the layer is QuantizeLinear and DequantizeLinear around a product, which ONNX runtimes know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile import gemm
from float8_compile.cast import cast_operand, saturating_cast, scale_from_amax
from float8_compile.linear import Float8Linear, autocast_input, check_input
from float8_compile.split import unflattened
from float8_compile.tensor import Operand

ONNX_OPSET = 21  # the first whose QuantizeLinear says its output's dtype
_ONNX_DTYPES = {
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
}  # onnx.TensorProto.DataType

# Whatever a user hung on the layer runs on.
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


class FrozenLinear(nn.Module):
    """Made by `export.freeze_for_inference` from a `Float8Linear`. Buffers, and no parameters:

    weight: float8, (N, K). weight_scale: float32, (), or (N, 1) with a scale per row.
    input_scale: float32, (). bias: (N,), of the layer's dtype, or None.
    in_features, out_features: K and N. fqn: the layer's name in the model that was converted, for messages.

    Casts of the model (`.half()`, `.to(dtype)`) leave weight and scales as they are.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: Float8Linear, input_scale: Tensor) -> None:
        """layer: of which `output` runs in float8. input_scale: float32, (), what the float8 input is multiplied by."""
        super().__init__()
        recipe, bias = layer.recipe, layer.bias
        assert recipe.output.left.dtype is not None
        self.in_features, self.out_features, self.fqn = layer.in_features, layer.out_features, layer.fqn
        self.input_dtype, self.fast_accum, self.emulate = (
            recipe.output.left.dtype,
            recipe.output.fast_accum,
            recipe.emulate,
        )
        with torch.no_grad():
            w8 = cast_operand(layer.weight, recipe.output.right)
            self.register_buffer("weight", w8.payload)
            self.register_buffer("weight_scale", w8.unscale)
            self.register_buffer("input_scale", input_scale)
            self.register_buffer("bias", None if bias is None else bias.detach().clone())
        for name in _HOOKS:
            getattr(self, name).update(getattr(layer, name))
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), of the input's dtype, or of autocast's where that is on."""
        check_input(input, self.in_features, self._name)
        x = autocast_input(input)
        if torch.onnx.is_in_onnx_export():
            return self._quantized_and_dequantized(x)
        x_MK = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        payload = saturating_cast(x_MK, self.input_scale.reciprocal(), self.input_dtype, foreign=True)
        x8 = Operand(payload, None, self.input_scale)
        w8 = Operand(self.weight, None, self.weight_scale)
        y_MN = gemm.output(x8, w8, x.dtype, fast_accum=self.fast_accum, emulate=self.emulate)
        y_MN = y_MN if self.bias is None else y_MN + self.bias.to(y_MN.dtype)
        return y_MN if x.dim() == 2 else unflattened(y_MN, x, None)

    def _quantized_and_dequantized(self, x: Tensor) -> Tensor:
        dtype = self.input_dtype

        def node(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, **attributes: Any) -> Tensor:
            shape = inputs[0].shape
            return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape, version=ONNX_OPSET)

        q = node("QuantizeLinear", (x.float(), self.input_scale), dtype, output_dtype=_ONNX_DTYPES[dtype], saturate=1)
        x = node("DequantizeLinear", (q, self.input_scale), torch.float32).to(x.dtype)
        by_row = {} if self.weight_scale.dim() == 0 else {"axis": 0}
        w_scale = self.weight_scale.flatten() if by_row else self.weight_scale
        w = node("DequantizeLinear", (self.weight, w_scale), torch.float32, **by_row).to(x.dtype)
        return nn.functional.linear(x, w, None if self.bias is None else self.bias.to(x.dtype))

    def _name(self) -> str:
        return f"FrozenLinear {self.fqn!r}" if self.fqn else "FrozenLinear"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in ("weight", "weight_scale", "input_scale")}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if (after := getattr(self, name)).dtype is not tensor.dtype:  # its bits are the numbers
                setattr(self, name, tensor.to(after.device))
        return self

    def extra_repr(self) -> str:
        per = "tensor" if self.weight_scale.dim() == 0 else "row"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight={self.weight.dtype}, one weight scale a {per}"
        )


def static_input_scale(amax: Tensor, layer: Float8Linear) -> Tensor:
    """float32, (): the `input_scale` that brings amax to the largest number of the layer's float8 input."""
    cast = layer.recipe.output.left
    assert cast.dtype is not None
    return scale_from_amax(amax, cast.dtype, cast.power_of_two).reciprocal()
