"""Float8 training across processes, on torch.distributed."""

from float8_compile.distributed.flat_gradients import ShardedFlatGradients
from float8_compile.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from float8_compile.weight_gather import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "ShardedFlatGradients",
    "precompute_float8_dynamic_scale_for_fsdp",
]
