"""What crosses from forward to backward, in bytes, of a function that is called as it is: compiled or not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], object], *inputs: Tensor) -> int:
    """Bytes that `forward()` keeps for backward, each storage once, and those of inputs only where it keeps them.

    What was there before isn't counted: parameters, a layer's own state, casts that lie ready. Calls it twice: what the
    two save in the same place was there before either.
    """
    given = {x.untyped_storage().data_ptr() for x in inputs}
    (first, output), (second, other) = _saved(forward), _saved(forward)
    del output, other  # were alive, so that no memory was used twice
    return sum(nbytes for place, nbytes in first.items() if place in given or place not in second)


def _saved(forward: Callable[[], object]) -> tuple[dict[int, int], object]:
    """Bytes by place in memory, and what keeps them alive."""
    tensors: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}, (output, tensors)
