"""Run the code that Inductor generated, with nothing behind it: what it would launch, with which tensors, in order.

The wrapper's `call` is executed as it is. Its allocations give fake CUDA tensors, its Triton kernels write down their
arguments, and every other op that it calls on tensors is seen on its way to the fake ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from float8_compile.preview import inductor
from float8_compile.preview.retarget import CUDA, Move

_FILE = "<generated for a preview>"
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+)")


@dataclass(frozen=True)
class KernelCall:
    """`name.run(*args)`: a Triton kernel. handle: Inductor's name for this very call, or for one before it."""

    name: str
    args: tuple[Any, ...]
    handle: str


@dataclass(frozen=True)
class OpCall:
    """An op on CUDA tensors that something other than Triton runs. handle: as above."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    handle: str

    def arguments(self) -> dict[str, Any]:
        """By name, those that were given."""
        names = (argument.name for argument in self.op._schema.arguments)
        return dict(zip(names, self.args, strict=False)) | self.kwargs


class DryRun:
    """calls: in order. sources: of the Triton kernels, by name."""

    def __init__(self, code: str) -> None:
        self.calls: list[KernelCall | OpCall] = []
        self.sources: dict[str, str] = {}
        self._handles = _handles(code)
        self._memory: dict[int, str] = {}  # by storage, which the calls' arguments keep alive

    def memory_of(self, tensor: Tensor) -> str:
        """The name by which the code first knew the tensor's memory; "" if it never named it."""
        return self._memory.get(_storage(tensor), "")

    def note_kernel(self, name: str, args: tuple[Any, ...]) -> None:
        """Called where a kernel would be launched."""
        self.calls.append(KernelCall(name, args, self._handle(args)))

    def note_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Called where an op has been called."""
        self.calls.append(OpCall(op, args, kwargs, result, self._handle((args, kwargs))))

    def _handle(self, args: Any) -> str:
        """That of the line of generated code which is running, whose names for the arguments are noted too."""
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_code.co_filename != _FILE:
            frame = frame.f_back
        assert frame is not None, "only generated code calls kernels and ops during a dry run"
        new = {_storage(x) for x in inductor.tree_leaves(args) if isinstance(x, Tensor)} - self._memory.keys()
        for name, value in frame.f_locals.items() if new else ():
            if isinstance(value, Tensor) and _storage(value) in new:
                self._memory.setdefault(_storage(value), name)
        return self._handles[frame.f_lineno]


def dry_run(code: str, inputs: Sequence[Any], constants: Mapping[str, Any], move: Move) -> DryRun:
    """Execute the generated module's `call(inputs)`."""
    run = DryRun(code)

    def triton(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        run.sources[name] = source
        return SimpleNamespace(run=lambda *args, **_: run.note_kernel(name, args))

    with inductor.nothing_runs(triton):
        namespace: dict[str, Any] = {"__name__": "generated_for_a_preview", "__file__": _FILE}
        exec(compile(code, _FILE, "exec"), namespace)
        namespace |= _ALLOCATIONS | {name: move(value) for name, value in constants.items()}
        with torch.no_grad(), move.mode, _Watch(run):
            namespace["call"](list(inputs))
    return run


class _Watch(inductor.TorchDispatchMode):
    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An `out=` variant often has no rule for fake tensors, and needs none: the result is given.
        given = [kwargs[argument.name] for argument in op._schema.arguments if argument.is_out]
        result = op(*args, **kwargs) if not given else given[0] if len(given) == 1 else tuple(given)
        if not (op.is_view or op.namespace == "prim" or op.overloadpacket.__name__.startswith("empty")):
            self.run.note_op(op, args, kwargs, result)
        return result


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)


def _reinterpret(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


# What the generated code gets from torch's C++ for its buffers, for fake tensors.
_ALLOCATIONS: dict[str, Any] = {
    "empty_strided_cuda": _allocate,
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": lambda *_: None,
    "assert_alignment": lambda *_: None,
    "copy_if_misaligned": lambda x: x,
}


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _handles(code: str) -> list[str]:
    """For each line, counted from 1, the last handle above it."""
    handles, last = [""], ""
    for line in code.splitlines():
        found = _HANDLE.search(line)
        last = found[1] if found else last
        handles.append(last)
    return handles
