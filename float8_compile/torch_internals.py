"""Every name of torch that we use and that torch does not promise to keep.

One entry each: why it is needed, what would break it, when to delete it. `tests/test_torch_internals.py` asks
for every one of them, so a torch that drops a name fails there and says which. Nothing here patches torch or
changes a setting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

__all__ = [
    "apply_function",
    "disabled_torch_function",
    "guard_or_false",
    "make_wrapper",
    "scaled_mm",
    "statically_known_true",
]

# torch._scaled_mm: the float8 GEMM, on the CPU, CUDA and ROCm. torch.nn.functional.scaled_mm is its public face
# since 2.10, but traces to `_scaled_mm_v2`, for which Inductor has no epilogue fusion or templates in 2.11.
# Delete when the oldest torch that we support lowers the public one equally well.
scaled_mm = torch._scaled_mm

# torch.Tensor._make_wrapper_subclass: the constructor that every traceable wrapper subclass uses, torch's own
# (DTensor) and torchao's; there is no public one. https://github.com/albanD/subclass_zoo
make_wrapper = Tensor._make_wrapper_subclass

# torch._C._disabled_torch_function_impl: what torch's own subclasses set as `__torch_function__` when only
# `__torch_dispatch__` shall see them. Documented in "Extending PyTorch", without a public alias.
disabled_torch_function = torch._C._disabled_torch_function_impl

# statically_known_true, guard_or_false (torch.fx.experimental.symbolic_shapes, documented but "experimental"):
# questions about a symbolic size that add no guard, so that padding to 16 costs no recompilation per token
# count. Dynamo knows both by name and evaluates them while it traces (2.11, 2.13, 2.14).


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without the 30 us that it takes eagerly to bind arguments of a `setup_context`.

    `Function.apply` looks up and binds the signature at each call, for keyword arguments that we don't use; its
    C++ base class has the rest. Dynamo and functorch know only the public one (the second question is
    torch._C._are_functorch_transforms_active). Delete when torch binds only where there are keywords.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
