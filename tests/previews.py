"""Previews made by hand: what the tests of tables and advice need, and nothing more.

A launch is a sentence about buffers: `reads(BF16, (8192, 4096), "primals_1")`, `writes(E4M3, (8192, 4096), "buf0")`.
"""

from __future__ import annotations

import math
from typing import Any

from float8_compile.preview.result import Buffer, Config, Graph, Kernel, Launch, Phase, Preview, Saved

BF16, E4M3, E5M2, FP32 = "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"
BYTES = {BF16: 2, E4M3: 1, E5M2: 1, FP32: 4}
CAST = ("aten.abs.default", "aten.amax.default", "aten.mul.Tensor", "prims.convert_element_type.default")

H100_BANDWIDTH, H100_FLOAT8, H100_BF16 = 3.352e12, 1979e12, 989.5e12


def reads(dtype: str, shape: tuple[int, ...], tensor: str = "", excess: float = 1.0) -> Buffer:
    """A buffer that is read as a whole; `excess` sectors for each that its bytes would fill."""
    nbytes = math.prod(shape) * BYTES[dtype]
    return Buffer("in_ptr", tensor, dtype, shape, nbytes, 0, round(nbytes * excess))


def writes(dtype: str, shape: tuple[int, ...], tensor: str = "", excess: float = 1.0) -> Buffer:
    """A buffer that is written as a whole."""
    nbytes = math.prod(shape) * BYTES[dtype]
    return Buffer("out_ptr", tensor, dtype, shape, 0, nbytes, round(nbytes * excess))


def launch(
    *buffers: Buffer, name: str = "triton_poi_fused_0", layers: tuple[str, ...] = ("up",), **more: Any
) -> Launch:
    """A Triton kernel, unless `kind` says otherwise."""
    reads, writes = sum(b.reads for b in buffers), sum(b.writes for b in buffers)
    fields: dict[str, Any] = {"kind": "triton", "nodes": (), "ops": (), "flops": 0, "dtypes": ""} | more
    fields.setdefault("seconds", max((reads + writes) / H100_BANDWIDTH, fields["flops"] / H100_FLOAT8))
    sectors = sum(b.sectors for b in buffers)
    return Launch(name=name, layers=layers, reads=reads, writes=writes, sectors=sectors, buffers=buffers, **fields)


def gemm(left: Buffer, right: Buffer, out: Buffer, layers: tuple[str, ...] = ("up",), **more: Any) -> Launch:
    """A float8 GEMM: (M, K) x (K, N) -> (M, N)."""
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return launch(left, right, out, name="aten._scaled_mm", layers=layers, kind="extern", flops=flops, **more)


def graph(*launches: Launch, phase: Phase = "forward", **more: Any) -> Graph:
    """With a kernel of one config for each Triton launch, unless `kernels` says otherwise."""
    kernels = {each.name: kernel(each.name) for each in launches if each.kind == "triton"}
    fields: dict[str, Any] = {"kernels": kernels, "saved": (), "code": "", "fx": ""} | more
    return Graph(phase=phase, launches=launches, **fields)


def kernel(name: str, *spills: int | None) -> Kernel:
    """One config for each number of spilled bytes; None: not compiled."""
    configs = (
        Config({"XBLOCK": 64}, 4, 1, 0)
        if each is None
        else Config({"XBLOCK": 64}, 4, 1, 0, registers=32 + each, spills=each, shared=1024, float8_conversions=2)
        for each in spills or (None,)
    )
    return Kernel(name, "", tuple(configs))


def saved(nbytes: int, dtype: str = BF16, layers: tuple[str, ...] = ("up",)) -> Saved:
    """A tensor that is kept, as a vector."""
    return Saved("mul", (nbytes // BYTES[dtype],), dtype, nbytes, layers)


def preview(*graphs: Graph, notes: tuple[str, ...] = ()) -> Preview:
    """For an H100."""
    return Preview("H100", graphs, notes, 1.0)
