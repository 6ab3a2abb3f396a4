"""The same memory as another tensor: parts of a vector that graphs take for tensors of their own."""

from __future__ import annotations

import torch
from torch import Tensor


def own_storage(part: Tensor) -> Tensor:
    """The same memory as a tensor of its own, with a storage and a version counter that others don't share.

    Higher-order ops (nested_compile_region) take no two inputs that share a storage, AOTAutograd puts inputs together
    again that share one and are written to, and autograd's version counter of one part must not move with another's.
    """
    if part.is_meta or type(part) is not Tensor:  # no memory, so nothing to share
        return part.clone()
    return torch.utils.dlpack.from_dlpack(part)
