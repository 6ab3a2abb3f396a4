"""The GPUs that a preview can be made for: what Inductor asks a device, and what a time cannot be below.

Bandwidth and peaks are the vendors' (NVIDIA's datasheets, dense, boost clock, SXM where there is a choice); sizes that
no datasheet gives (L2, shared memory per block) are those of NVIDIA's tuning guides and of `cudaGetDeviceProperties`.
AMD's MI300X is missing on purpose: a CPU or CUDA build of torch has no ROCm in it to generate code for, and Triton's
sectors, float8 formats (e4m3fnuz) and resource usage are others there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """One GPU.

    bandwidth: of its memory, in bytes/s. float8, bfloat16, tf32, float32: dense peaks in FLOP/s.
    l2, shared: bytes of L2 cache, and of shared memory that one block may ask for. threads: that a multiprocessor
    keeps at a time.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    bandwidth: float
    float8: float
    bfloat16: float
    tf32: float
    float32: float
    l2: int
    shared: int
    threads: int = 2048

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s that a GEMM with operands of this dtype cannot exceed."""
        if dtype.itemsize == 1:
            return self.float8
        if dtype.itemsize == 2:
            return self.bfloat16
        return self.float32 if torch.get_float32_matmul_precision() == "highest" else self.tf32


GIB, MIB, KIB = 2**30, 2**20, 2**10

_ALL = (
    # nvidia.com/en-us/data-center/h100, SXM (PDF 2287922): 3.35 TB/s, FP8 3958, BF16 1979, TF32 989 TFLOP/s with
    # sparsity (half of it dense), FP32 67; 132 SMs, 50 MB L2 (Hopper whitepaper); 227 KB (Hopper tuning guide).
    Target("H100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, 3.352e12,
           1979e12, 989.5e12, 494.7e12, 67e12, 50 * MIB, 227 * KIB),
    # nvidia.com/en-us/data-center/h200: 4.8 TB/s, 141 GB; the chip is the H100's.
    Target("H200", "NVIDIA H200", (9, 0), 132, 141 * GIB, 4.8e12,
           1979e12, 989.5e12, 494.7e12, 67e12, 50 * MIB, 227 * KIB),
    # Blackwell datasheet, HGX B200, an eighth of it: 8 TB/s, 180 GB; FP8 9, BF16 4.5, TF32 2.2 PFLOP/s with sparsity,
    # FP32 75; 148 SMs, 126 MB L2; 227 KB (Blackwell tuning guide).
    Target("B200", "NVIDIA B200", (10, 0), 148, 180 * GIB, 8e12,
           4500e12, 2250e12, 1100e12, 75e12, 126 * MIB, 227 * KIB),
    # nvidia.com/en-us/data-center/l40s: 864 GB/s, 48 GB; FP8 733, BF16 362, TF32 183 dense, FP32 91.6; 142 SMs,
    # 96 MB L2 (Ada whitepaper); 99 KB (Ada tuning guide).
    Target("L40S", "NVIDIA L40S", (8, 9), 142, 48 * GIB, 8.64e11,
           733e12, 362e12, 183e12, 91.6e12, 96 * MIB, 99 * KIB, 1536),
)  # fmt: skip
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}


def named(target: str) -> Target:
    """The target of this name, in any case. Raises ValueError that names those there are."""
    try:
        return TARGETS[target.upper()]
    except KeyError:
        raise ValueError(f"no target {target!r}; there is {', '.join(TARGETS)}") from None
