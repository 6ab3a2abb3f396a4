"""What forward keeps for backward, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that one of another class is made of, such as float8 codes and scales, or this process's shard."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for value in inner if isinstance(value, Tensor) for part in parts(value)]


def count_saved_bytes(model: nn.Module, forward: Callable[[], Result]) -> tuple[Result, int]:
    """The result of `forward()`, and the bytes of all storages that it keeps for backward.

    Parameters and buffers are left out: they are there anyway. A compiled block is one autograd
    node that saves what crosses from its forward graph to its backward graph: hooks see just that. Of several
    processes, those of this one; FSDP2 has emptied the storages of gathered weights when forward is over.
    """
    kept: list[torch.UntypedStorage] = []

    def note(tensor: Tensor) -> Tensor:
        kept.extend(part.untyped_storage() for part in parts(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    storages = {storage.data_ptr(): storage.nbytes() for storage in kept}
    for own in (*model.parameters(), *model.buffers()):
        for part in parts(own):
            storages.pop(part.untyped_storage().data_ptr(), None)
    return result, sum(storages.values())
