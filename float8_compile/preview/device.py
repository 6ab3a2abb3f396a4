"""Everything that stands in for the GPU: answers to what Inductor and Triton ask about it, and nothing that would run.

Inside `pretended(target)` this process has one CUDA device, the target; outside nothing is changed. Most of the names
replaced here are public ones of torch and Triton; the private ones are

    torch.cuda._exchange_device     what `with torch.cuda.device(0)` does, in torch's code and in the generated one
    torch.utils._triton             questions such as has_triton(), for their memory of the answers only
    torch._inductor.utils, hints, codecache.CacheBase, torch._dynamo.debug_utils    the same
    triton_helpers.set_driver_to_gpu    in each generated kernel's source: raises where Triton finds no driver

A torch that lacks one of them fails here with its name, at the first preview.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._triton as triton_questions
import triton
from torch._dynamo import debug_utils, device_interface
from torch._inductor import codecache
from torch._inductor import utils as inductor_utils
from torch._inductor.runtime import hints, triton_helpers
from triton.backends.compiler import GPUTarget

from float8_compile.targets import Target


@contextlib.contextmanager
def pretended(target: Target) -> Iterator[None]:
    """Inside, cuda:0 is the target, for whoever asks; what would run something on it does nothing."""
    interface, properties = _interface(target), _properties(target)
    device_interface.get_registered_device_interfaces()  # at the first question the real ones register themselves
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: target.capability,
            # what torch does because it is available
            "set_device": lambda device: None,
            "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device="cuda": None,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
        },
        torch.version: {"cuda": torch.version.cuda or "13.0"},
    }
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_answers)
        for owner, names in replaced.items():
            stack.enter_context(mock.patch.multiple(owner, **names))
        known = {"cuda": interface, "cuda:0": interface}
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, known))
        stack.enter_context(triton_driver(target))
        stack.enter_context(_device_guard())
        _forget_answers()
        yield


@contextlib.contextmanager
def triton_driver(target: Target) -> Iterator[None]:
    """Inside, Triton knows which GPU it would compile for, and `has_triton()` is true."""
    with (
        mock.patch.object(triton_questions, "has_triton", return_value=True),  # Dynamo asks before it traces a kernel
        mock.patch.object(type(triton.runtime.driver), "active", _Driver(target)),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
    ):
        yield


class _Driver:
    """Triton's GPU driver, as far as compiling asks for it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        properties = {"max_shared_mem": target.shared, "multiprocessor_count": target.multiprocessors, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda device=0: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _number(self.target), 32)

    def get_current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"preview: Triton's driver was asked for {name!r}, and there is no GPU")


def _number(target: Target) -> int:
    """90 for (9, 0)."""
    major, minor = target.capability
    return major * 10 + minor


def _properties(target: Target) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` gives, and Inductor reads."""
    major, minor = target.capability
    return SimpleNamespace(
        name=target.full_name,
        major=major,
        minor=minor,
        multi_processor_count=target.multiprocessors,
        total_memory=target.memory,
        L2_cache_size=target.l2,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=target.shared,
        shared_memory_per_multiprocessor=target.shared + 2**10,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _interface(target: Target) -> type[device_interface.DeviceInterface]:
    """Dynamo's and Inductor's view of a device: their own seam for devices that torch doesn't know."""
    properties = _properties(target)

    def always(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    worker = {
        "set_device": always(None),
        "current_device": always(0),
        "get_device_properties": always(properties),
    }
    answers = {
        "Worker": type("Worker", (), worker),
        "is_available": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "set_device": always(None),
        "exchange_device": always(0),
        "maybe_exchange_device": always(0),
        "synchronize": always(None),
        "get_raw_stream": always(0),
        "memory_allocated": always(0),
        "get_device_properties": always(properties),
        "get_compute_capability": always(_number(target)),
        "is_bf16_supported": always(True),
        "is_triton_capable": always(True),
        "raise_if_triton_unavailable": always(None),
    }
    return type("PretendedCuda", (device_interface.CudaInterface,), answers)


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Inside, `t[i]` and `~t` work on a fake CUDA tensor on a CPU build of torch.

    They switch to the tensor's device in C++, also for a fake one. A CUDA build without a GPU has a guard that does
    nothing (FakeTensorMode sees to that); a CPU build has none, and raises "not linked with support for cuda devices".
    So CUDA's place in c10's registry of guards gets the one of the meta device, which does nothing either. The numbers
    are c10::DeviceType's, which are written into saved files and so never change.
    """
    if torch.cuda._is_compiled():
        yield
        return
    cuda, meta = 1, 14
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (meta + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


# Answers about the device that torch remembers; the real ones and the pretended must not mix.
_REMEMBERING = [
    question
    for owner in (triton_questions, inductor_utils, hints.DeviceProperties, codecache.CacheBase, debug_utils)
    for question in (getattr(owner, name) for name in dir(owner))
    if hasattr(question, "cache_clear")
]


def _forget_answers() -> None:
    for question in _REMEMBERING:
        question.cache_clear()
