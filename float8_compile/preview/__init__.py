"""What Inductor would generate for a GPU, on a machine that has none.

    import float8_compile as f8

    def build():                                   # runs on the meta device: no memory is needed
        model = f8.convert_to_float8_training(Model())
        return model, (torch.randn(8, 1024),)

    result = f8.preview(build, target="H100")
    print(result)
    result.total("triton").sectors                 # bytes that the Triton kernels of forward and backward move

The path to read: capture.py -> inductor.py, device.py, dry_run.py -> launches.py, sectors.py; result.py for what comes
out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from float8_compile.preview.result import Preview
from float8_compile.targets import TARGETS

__all__ = ["TARGETS", "Preview"]


class _CallablePackage(ModuleType):
    """`float8_compile.preview` is a package and is called too: the design gives both this name."""

    def __call__(self, build: Callable[[], Any], target: str = "H100", *, compile_kernels: bool = False) -> Preview:
        """Trace what `build()` returns, forward and backward, and generate the code for `target`.

        build: makes a model and its inputs, under `torch.device("meta")`; returns (callable, args), where args is a
            tuple or a tensor, or (callable, args, kwargs). Backward is previewed where an output requires a gradient.
        target: one of `TARGETS`.
            Delayed scales are shown in their steady state, not in the first step.
        compile_kernels: compile every candidate config to machine code too, for registers, spills and PTX; takes
            about a second a kernel.

        What was compiled before in this process is forgotten by torch, and compiled again when it next runs.

        Raises ValueError for an unknown target and for tensors that `build` puts elsewhere than on meta,
        NotImplementedError for what cannot be modelled: `torch.autocast`, `.cuda()`, streams and whatever else needs
        CUDA itself, values of tensors. What could only be modelled in part is in the result's `notes`.
        """
        from float8_compile.preview.capture import capture  # brings Inductor and triton

        return capture(build, target, compile_kernels=compile_kernels)


sys.modules[__name__].__class__ = _CallablePackage
