"""How many kernels a step launches; on a CPU, how many functions Inductor's code for it calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.allocations import events_of

# Functions that Inductor generated (on a CPU a whole loop nest, or several), and those of libraries and of torch.
CALL = re.compile(r"(?<![\w.])(?:cpp_\w+|extern_kernels\.\w+|(?:torch\.ops|aten)\.[\w.]+)\(")


def counted(on_a_gpu: bool, by_inductor: bool) -> str:
    """In words, what is counted."""
    if on_a_gpu:
        return "Kernels are those that the GPU ran, by torch's profiler."
    of_inductor = "calls of functions, generated ones and torch's, in Inductor's code for the CPU"
    return f"Kernels are {of_inductor if by_inductor else 'not counted for this backend on a CPU'}."


def launches_of(step: Callable[[], object], on_a_gpu: bool, by_inductor: bool) -> int | None:
    """Calls the step, which compiles it. None where there is nothing to count."""
    if on_a_gpu:
        step()
        return _launched(step)
    return _called(step) if by_inductor else None


def _launched(step: Callable[[], object]) -> int:
    """Kernels that the GPU has run, without copies and without what is filled by its driver."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.get("cat") == "kernel" for event in events_of(profiler))


def _called(step: Callable[[], object]) -> int:
    """Calls in the code that Inductor generates in this step, or has generated before and takes from its cache."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        step()
    return sum(calls_in(code) for code in dict.fromkeys(codes))


def calls_in(code: str) -> int:
    """Of Inductor's code for one graph."""
    lines = (line for line in code.splitlines() if not line.lstrip().startswith("#"))
    return sum(len(CALL.findall(line)) for line in lines)
