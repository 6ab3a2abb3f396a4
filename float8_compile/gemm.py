"""The three GEMMs of a linear layer: layouts, padding, scales, emulation.

M: tokens   K: in_features   N: out_features        shapes are suffixes: x_MK, w_NK, g_MN

    output(x_MK, w_NK)      = x @ w.T    -> (M, N)      contracts K
    grad_input(g_MN, w_NK)  = g @ w      -> (M, K)      contracts N
    grad_weight(g_MN, x_MK) = g.T @ x    -> (N, K)      contracts M

Hopper's float8 GEMM wants both operands contiguous along the contracted axis, and the contracted axis and the
columns of the result in multiples of 16. So backward needs weight, input and gradient in the other layout, a
one-byte transposition that Inductor writes in the kernel that casts; odd sizes are padded with zeros, which add
nothing, and the result is cut.

Operands are Float8Tensors or Operands; plain tensors where the recipe says high precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import guard_or_false, scaled_mm, statically_known_true

ALIGNMENT = 16

AnyOperand = Tensor | Operand


def output(
    x_MK: AnyOperand,
    w_NK: AnyOperand,
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    emulate: bool = False,
    in_memory: bool = False,
) -> Tensor:
    """`x @ w.T`, (M, N) of the given dtype. in_memory: of x, see `_one_buffer`."""
    return _contract(*_parts(x_MK), *_parts(w_NK), dtype, fast_accum, emulate, in_memory)


def grad_input(
    g_MN: AnyOperand,
    w_NK: AnyOperand,
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    emulate: bool = False,
    in_memory: bool = False,
) -> Tensor:
    """`g @ w`, (M, K) of the given dtype. in_memory: of g, see `_one_buffer`."""
    return _contract(*_parts(g_MN), *_transposed_parts(w_NK), dtype, fast_accum, emulate, in_memory)


def grad_weight(
    g_MN: AnyOperand,
    x_MK: AnyOperand,
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """`g.T @ x`, (N, K) of the given dtype."""
    return _contract(*_transposed_parts(g_MN), *_transposed_parts(x_MK), dtype, fast_accum, emulate)


def stored_transposed(payload: Tensor) -> Tensor:
    """The same matrix, stored column by column: the layout in which `grad_input` reads a weight."""
    return payload.t().contiguous().t()


def _contract(
    a_RC: Tensor,
    unscale_a: Tensor | None,
    b_SC: Tensor,
    unscale_b: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
    emulate: bool,
    in_memory: bool = False,
) -> Tensor:
    """`a @ b.T`, (R, S): every one of the three has this form, rows R, columns S, contracted axis C.

    a, b: float8 payloads with 1 / scale, of shape () or (R, 1) and (S, 1); or high precision and None.
    """
    rows, contracted, columns = *a_RC.shape, b_SC.shape[0]
    if guard_or_false(a_RC.numel() == 0):
        return torch.zeros(rows, columns, dtype=dtype, device=a_RC.device)
    if unscale_a is None or unscale_b is None:
        return (a_RC @ b_SC.t()).to(dtype)
    # Beside the result's rows and columns, (R, 1) and (1, S), and so by their strides too: a transposed one is not.
    if unscale_a.dim() > 0:
        unscale_a = unscale_a.flatten().unsqueeze(1)
    if unscale_b.dim() > 0:
        unscale_b = unscale_b.reshape(1, -1)
    if emulate:
        return (_float32_product(a_RC, b_SC) * (unscale_a * unscale_b)).to(dtype)
    a, b, whole_columns = _by_rows(a_RC), b_SC.contiguous(), _is_aligned(columns)
    if not (whole_columns and _is_aligned(contracted)):
        a, b = _pad(a, contracted), _pad(b, contracted, columns)
    if not in_memory:
        a = _one_buffer(a)
    by_tensor = unscale_a.dim() == 0 and unscale_b.dim() == 0
    if by_tensor:  # with a scale per row it makes Inductor write a transposed cast uncoalesced (benchmarks/LOG.md)
        b = _one_buffer(b)
    by_row = unscale_a.dim() == 2 and unscale_b.dim() == 2 and fast_accum and dtype is torch.bfloat16
    if by_tensor or by_row:
        if by_row and not whole_columns:
            unscale_b = F.pad(unscale_b, (0, -columns % ALIGNMENT), value=1.0)
        result = scaled_mm(a, b.t(), unscale_a, unscale_b, out_dtype=dtype, use_fast_accum=fast_accum)
        return result if whole_columns else result[:, :columns]
    product = _unscaled_product(a, b, dtype)
    # Scales first: a huge one times a product of payloads is inf, also where the other one would bring it back.
    return ((product if whole_columns else product[:, :columns]) * (unscale_a * unscale_b)).to(dtype)


def _unscaled_product(a_RC: Tensor, b_SC: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of the payloads, to be scaled in a pointwise kernel that Inductor fuses with what follows.

    CUDA's row-wise kernel gives only bfloat16, takes no mixture of granularities, and is slow without fast
    accumulation, where the tensor-wise one is not. With powers of two the two ways are equal to the bit.
    """
    one = a_RC.new_ones((), dtype=torch.float32)
    raw_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32  # float16 could overflow unscaled
    return scaled_mm(a_RC, b_SC.t(), one, one, out_dtype=raw_dtype)


def _one_buffer(payload: Tensor) -> Tensor:
    """The payload, in a graph in memory: Inductor would compute it again for each GEMM that reads it, a copy for each.

    It writes an operand of `_scaled_mm` where the GEMM wants it, and notices no other reader of what it casts; of
    `as_strided`, here the identity, it writes the input once. Not for what a collective has brought (`in_memory`): it
    is there already, and async tensor parallelism looks for a GEMM that reads it as it is. Strides are not asked for:
    in a backward Dynamo gives that up and traces it a second time, with gradients made contiguous.
    """
    if not torch.compiler.is_compiling():
        return payload
    return payload.as_strided(payload.shape, (payload.shape[1], 1))


def _by_rows(payload: Tensor) -> Tensor:
    """Contiguous, and by its strides too: a row that was a column is (1, 1) apart, which CUDA takes for a column."""
    return payload.reshape(-1).unsqueeze(0) if guard_or_false(payload.shape[0] == 1) else payload.contiguous()


def _float32_product(a_RC: Tensor, b_SC: Tensor) -> Tensor:
    """The product of the payloads in float32, in which products of float8 values are exact."""
    with torch.autocast(a_RC.device.type, enabled=False):
        return a_RC.float() @ b_SC.float().t()


def _parts(t: AnyOperand) -> tuple[Tensor, Tensor | None]:
    """The payload and 1 / scale; or high precision and None."""
    if isinstance(t, Operand):
        return t.payload, t.unscale if t.unscale is not None or t.scale is None else t.scale.reciprocal()
    return (t.payload, t.scale.reciprocal()) if isinstance(t, Float8Tensor) else (t, None)


def _transposed_parts(t: AnyOperand) -> tuple[Tensor, Tensor | None]:
    payload, unscale = _parts(t)
    return payload.t(), unscale if unscale is None or unscale.dim() == 0 else unscale.t()


def _is_aligned(size: int) -> bool:
    """Whether a size is known to be a multiple of 16; asking adds no guard on a symbolic one."""
    return statically_known_true(size % ALIGNMENT == 0)


def _pad(payload: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Zeros to the right and, where rows is given, below. As bytes: float8 has no padding kernel everywhere."""
    if _is_aligned(columns) and _is_aligned(rows):
        return payload
    zeros = (0, -columns % ALIGNMENT, 0, -rows % ALIGNMENT)
    return F.pad(payload.view(torch.uint8), zeros).view(payload.dtype)
