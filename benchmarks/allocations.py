"""Memory as behaviour: the most bytes allocated at one time, and the bytes still allocated at a moment.

The vocabulary of tests about peaks and leaks. Counted are torch's own allocations on the CPU, as its profiler sees
them: those of eager ops, of Inductor's code, and what only autograd holds, such as a tensor on a `ctx`, which no search
through Python's objects would find.
"""

from __future__ import annotations

import gc
import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "allocations: "


@dataclass(frozen=True)
class Memory:
    """Bytes of what was allocated during a run; what was there before doesn't count, freed or not.

    peak: the most at one time, but not inside `aten::_scaled_mm`: a CPU without float8 multiplies in float32, and
        allocates both operands anew for that, which no GPU does.
    alive: at the end, with what the run returned still there.
    marks: at each `mark`, in order, with its name.
    """

    peak: int
    alive: int
    marks: list[tuple[str, int]]

    def at(self, name: str) -> list[int]:
        """The bytes at each mark of this name."""
        return [alive for marked, alive in self.marks if marked == name]


def of_microbatch(loss: Callable[[], Tensor], gradient: Tensor | None = None) -> tuple[int, int, int]:
    """Bytes alive when `loss()` is there, after its backward, and the most at one time; see `Memory`.

    gradient: the loss's own, where it is no number but a block's output.
    """

    def microbatch() -> Tensor:
        value = loss()
        mark("forward")
        value.backward(gradient)
        return value

    memory = memory_of(microbatch)
    return memory.at("forward")[0], memory.alive, memory.peak


def of_microbatch_on_a_gpu(loss: Callable[[], Tensor], gradient: Tensor | None = None) -> tuple[int, int, int]:
    """The same, by torch.cuda's own count."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = loss()
    forward = torch.cuda.memory_allocated()
    value.backward(gradient)
    return forward - before, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def mark(name: str) -> None:
    """Have the bytes at this moment noted."""
    with record_function(_MARK + name):
        pass


def memory_of(run: Callable[[], Any]) -> Memory:
    """What `run()` allocates. No garbage is collected meanwhile: what waits for that, in a cycle, is alive."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            returned = run()
        events = events_of(profiler)
        del returned
        return _memory(sorted(events, key=lambda event: event["ts"]))
    finally:
        if collects:
            gc.enable()


def events_of(profiler: profile) -> list[dict[str, Any]]:
    """All that it has seen, as its trace says it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def _memory(events: list[dict[str, Any]]) -> Memory:
    times, totals, sizes = [-1.0], [0], dict[int, int]()
    peak, gemm_end, marks = 0, -1.0, []
    for event in events:
        name, time = event["name"], event["ts"]
        if name == "aten::_scaled_mm":
            gemm_end = time + event["dur"]
        elif name.startswith(_MARK):
            marks.append((name.removeprefix(_MARK), time))
        elif name == "[memory]":
            address, change = event["args"]["Addr"], event["args"]["Bytes"]
            if change > 0:
                sizes[address] = change
            else:
                change = -sizes.pop(address, 0)
            times.append(time)
            totals.append(totals[-1] + change)
            if time > gemm_end:
                peak = max(peak, totals[-1])
    at_marks = [(name, totals[bisect_right(times, time) - 1]) for name, time in marks]
    return Memory(peak=peak, alive=totals[-1], marks=at_marks)


def nbytes(*tensors: Tensor | None) -> int:
    """Of these tensors together, each with a memory of its own."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
