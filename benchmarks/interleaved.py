"""Seconds per call of several callables, measured in turns: what slows the machine for a while slows all of them alike.

samples = interleaved({"a": a, "b": b}, rounds=100)     {"a": [seconds, ...], "b": [...]}, one of each per round
quantiles(samples["a"])                                 {"p5": seconds, ..., "median": ..., ..., "p95": ...}
ratio(samples["a"], samples["b"])                       the median of a / b, round by round
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Contender = Callable[[], object]

WARM_UP = 3
MOST_CALLS = 1000
CACHES_MATTER = 0.05  # seconds: in a longer call it doesn't show in what state it found them


def interleaved(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
    at_least: float = 1e-3,
    after_round: Callable[[int], object] = lambda done: None,
    samples: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """A sample of each contender in each round, in an order that changes from round to round: a neighbour that leaves
    the caches full does so to everyone.

    device: where the contenders' tensors are. On a GPU its own clock is read, so work that is only queued counts, and
        so do the gaps in which it waits for the host.
    clock: elsewhere. `time.thread_time` leaves out what other programs take, if all work is this thread's.
    at_least: seconds. What takes less is called several times for a sample. Before it comes a call that doesn't count,
        which would show in what state the others left the caches.
    after_round: called with the number of rounds done, to show progress; what it takes is not measured.
    samples: what is filled and returned, for a caller that wants those of each round while it goes on.
    """
    measure = _gpu_seconds if torch.device(device).type == "cuda" else functools.partial(_cpu_seconds, clock)
    samples = {} if samples is None else samples
    samples.update((name, []) for name in contenders)
    order, shuffled = list(contenders), random.Random(0)
    with _without_garbage_collection():
        once = {name: _seconds_once(contender, measure) for name, contender in contenders.items()}
        for done in range(1, rounds + 1):
            shuffled.shuffle(order)
            for name in order:
                if once[name] < CACHES_MATTER:
                    contenders[name]()
                calls = max(1, min(MOST_CALLS, math.ceil(at_least / max(once[name], 1e-9))))
                samples[name].append(measure(contenders[name], calls))
            gc.collect()
            after_round(done)
    return samples


def seconds(call: Contender, device: str) -> float:
    """Of one call, on the host's clock, with all that it has queued: for what can't be repeated, or is long."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """The 5th, 25th, 75th and 95th percentile, and the median, in order."""
    if len(samples) == 1:
        samples = [*samples, *samples]
    twentieths = statistics.quantiles(samples, n=20, method="inclusive")
    return dict(zip(("p5", "p25", "median", "p75", "p95"), (twentieths[n] for n in (0, 4, 9, 14, 18)), strict=True))


def ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long as the others, by the median of the rounds: a slow minute is in both of a pair."""
    return statistics.median(one / other for one, other in zip(samples, others, strict=True))


def _seconds_once(contender: Contender, seconds: Callable[[Contender, int], float]) -> float:
    """How long a call takes, roughly, after some that warm up what is behind it."""
    for _ in range(WARM_UP):
        contender()
    return min(seconds(contender, 1) for _ in range(WARM_UP))


def _cpu_seconds(clock: Callable[[], float], contender: Contender, calls: int) -> float:
    start = clock()
    for _ in range(calls):
        contender()
    return (clock() - start) / calls


def _gpu_seconds(contender: Contender, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        contender()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """It would fall upon whoever is just being measured. What there is by now is left out of later collections too."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
