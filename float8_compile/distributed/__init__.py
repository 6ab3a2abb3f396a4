"""Float8 training across processes, on torch.distributed."""

from float8_compile.distributed.flat_gradients import ShardedFlatGradients

__all__ = ["ShardedFlatGradients"]
