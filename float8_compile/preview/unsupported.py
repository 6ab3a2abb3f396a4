"""What a preview cannot model: it says so, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import fx


class UnsupportedError(NotImplementedError):
    """Something that a preview would get wrong."""


class NotOnMetaError(ValueError):
    """A tensor that isn't where `build` should have made it."""


def refuse_autocast(graphs: Iterable[fx.GraphModule] = ()) -> None:
    """Raise `UnsupportedError` where autocast is on, here or somewhere in the graphs.

    They are traced on the CPU, where autocast for CUDA does nothing and the CPU's has rules of its own.
    """
    entered = [
        node.args[0]
        for graph in graphs
        for node in graph.graph.nodes
        if getattr(node.target, "__name__", "") == "_enter_autocast" and node.args[2]
    ]
    entered += [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    if entered:
        raise UnsupportedError(
            f'a preview cannot model torch.autocast("{entered[0]}"), whose rules are those of a real device: '
            "call .bfloat16() on the model and its inputs instead"
        )


# What an error's text has in it, where the reason is that there is no GPU, and what the reader should know.
_REASONS = {
    ("meta and cpu", "cpu and meta"): "a tensor made on the CPU meets those of build(), which are on meta as they "
    "would be on the GPU: make it with device=x.device",
    ("autocast",): "a preview cannot model torch.autocast: call .bfloat16() on the model and its inputs instead",
    (
        "support for cuda",
        "cuda support",
        "cuda enabled",
        "cuda is not available",
        "no cuda gpus",
        "nvidia driver",
        "meta and cuda",
        "cuda:0 and meta",
    ): "the model asks for CUDA itself, and there is no GPU: leave out devices, or take those of other tensors",
    ("meta tensor", "data-independent"): "the model asks for values, and in a preview tensors have none",
}


@contextmanager
def explained() -> Iterator[None]:
    """Inside, what fails for want of a GPU raises `UnsupportedError`, which says so."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, (UnsupportedError, NotOnMetaError)):
                raise cause from None
        text = str(error).lower()
        for words, explanation in _REASONS.items():
            if any(word in text for word in words):
                raise UnsupportedError(f"{explanation}\n\n{error}") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
