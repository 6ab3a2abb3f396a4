"""What depends on the device while AOTAutograd traces: as CUDA has it, in a graph that is traced on the CPU.

attention       torch picks a kernel by the tensors' device. On the CPU that is the CPU's flash attention, or plain
                arithmetic where that can't do (dropout); so the call is taken over, and autograd records CUDA's
                backward with it. Where cuDNN's attention would be preferred (H100 and B200 with a recent cuDNN)
                flash attention stands for it: it reads and writes the same tensors.
RMSNorm         one op with a backward of its own on CUDA, which Inductor takes apart; plain arithmetic elsewhere.
LayerNorm       keeps its statistics in float32 on CUDA, in the input's dtype on the CPU.
tiny GEMMs      with a contracted axis of 1 they are products on CUDA; other shapes are taken apart on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from float8_compile.preview import inductor

aten = torch.ops.aten

LARGEST_HEAD = 256  # of flash attention
ALIGNMENT = 8  # elements: of flash attention's heads, and of the rows of the memory-efficient one's mask


class TracedAsCuda(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` and `rms_norm` trace to what a CUDA device would run."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run: Callable[..., Any] = _TAKEN_OVER.get(func, func)
        return run(*args, **(kwargs or {}))


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, by op, with CUDA's for those that ask for the device."""
    table = inductor.select_decomp_table()
    return table | {op: partial(rule, table.get(op)) for op, rule in _RULES.items()}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`functional.scaled_dot_product_attention` by the op that CUDA would choose: flash, memory-efficient, or plain."""
    flash, efficient = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention
    fused = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype
    half = query.dtype in (torch.bfloat16, torch.float16)
    if fused and half and attn_mask is None and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD and _on("flash"):
        head = query.shape[-1]
        padding = -head % ALIGNMENT
        q, k, v = (functional.pad(x, (0, padding)) if padding else x for x in (query, key, value))
        return flash(q, k, v, dropout_p, is_causal, scale=scale or head**-0.5)[0][..., :head]
    if fused and _on("mem_efficient") and query.shape[1] == key.shape[1]:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return efficient(query, key, value, bias, gradients, dropout_p, is_causal, scale=scale)[0]
    plain = aten._scaled_dot_product_attention_math
    return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def patterns_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What Inductor's patterns write for attention that is written by hand; on CUDA float32 stays as it is."""
    if query.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return aten._scaled_dot_product_attention_math(query, *args, **kwargs)[0]
    return attention(query, *args, **kwargs)


def _on(kernel: str) -> bool:
    return getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask to add, of query's dtype, its rows padded to a multiple of 8 elements and read without the padding."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    length = key.shape[-2]
    padded = functional.pad(mask, (0, -length % ALIGNMENT)) if length % ALIGNMENT else mask
    return padded[..., :length].expand(*query.shape[:2], query.shape[-2], length)


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`functional.rms_norm`."""
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return _RMSNorm.apply(input, list(normalized_shape), weight, eps)


class _RMSNorm(torch.autograd.Function):
    """aten._fused_rms_norm, taken apart by torch's own rules for it and for its backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        output, rstd = inductor.select_decomp_table()[aten._fused_rms_norm.default](input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        rule = inductor.select_decomp_table()[aten._fused_rms_norm_backward.default]
        input_grad, weight_grad = rule(grad, input, ctx.shape, rstd, weight, wanted)
        return input_grad, None, weight_grad, None


_TAKEN_OVER: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: attention,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}


def _layer_norm(rule: Any, input: Tensor, shape: list[int], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, mean, rstd = rule(input.to(torch.promote_types(input.dtype, torch.float32)), shape, *rest)
    return output.to(input.dtype), mean, rstd


def _mm(_: Any, a: Tensor, b: Tensor, **options: Any) -> Any:
    return a * b if _is_outer(a, b) and not options else NotImplemented


def _addmm(_: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, **options: Any) -> Any:
    return alpha * (a * b) + beta * bias if _is_outer(a, b) and not options else NotImplemented


def _bmm(_: Any, a: Tensor, b: Tensor, **options: Any) -> Any:
    return (a * b).contiguous() if a.shape[2] == b.shape[1] == 1 and not options else NotImplemented


def _is_outer(a: Tensor, b: Tensor) -> bool:
    """Whether a column meets a row, and neither is one number."""
    return a.shape[-1] == 1 and a.shape[0] != 1 and b.shape[1] != 1


_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}
