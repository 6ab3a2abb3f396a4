"""What forward keeps for backward, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")


def count_saved_bytes(model: nn.Module, forward: Callable[[], Result]) -> tuple[Result, int]:
    """The result of `forward()`, and the bytes of all storages that it keeps for backward.

    Parameters and buffers are left out: they are there anyway. A compiled block is one autograd
    node that saves what crosses from its forward graph to its backward graph: hooks see just that.
    """
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    for own in (*model.parameters(), *model.buffers()):
        storages.pop(own.untyped_storage().data_ptr(), None)
    return result, sum(storages.values())
