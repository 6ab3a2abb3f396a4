"""Triton kernels as a user would write them, for previews of models that call them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, launched directly."""
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
    return out


@triton.jit
def tile(pointer, rows, columns, stride):
    return pointer + rows[:, None] * stride + columns[None, :]


@triton.autotune(
    configs=[triton.Config({"BM": 64, "BN": 64}, num_warps=4), triton.Config({"BM": 1, "BN": 512}, num_warps=4)],
    key=["M", "N"],
)
@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    x = tl.load(tile(x_ptr, rows, columns, N), mask=mask)
    tl.store(out_ptr + columns[None, :] * M + rows[:, None], x, mask=mask)


@torch.library.triton_op("float8_compile_tests::transposed", mutates_args={})
def transposed(x: Tensor) -> Tensor:
    """x.t(), contiguous: two configs, of which the second stores a column at a time."""
    (m, n), out = x.shape, x.new_empty(x.shape[::-1])
    grid = lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"]))  # noqa: E731
    torch.library.wrap_triton(transpose_kernel)[grid](x, out, m, n)
    return out


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    block = tl.make_block_ptr(x_ptr, (n,), (1,), (tl.program_id(0) * BLOCK,), (BLOCK,), (0,))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(block))


def through_a_block_pointer(x: Tensor) -> Tensor:
    """A copy of x."""
    out = torch.empty_like(x)
    block_pointer_kernel[(x.numel() // 256,)](x, out, x.numel(), BLOCK=256)
    return out
