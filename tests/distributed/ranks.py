"""Real processes with gloo: a few ranks that wait for functions, run them all at once and hand back what they return.

Starting a process takes longer than most tests, so a test file starts its ranks once. A function that raises on a rank
raises here, with that rank's traceback; one that hangs raises after TIMEOUT seconds; both end the ranks, and the next
call starts new ones.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

TIMEOUT = 180  # a rank may compile while the others wait for it, on a machine that is busy


class Ranks:
    """`ranks(function, *args)`: what `function(*args)` returns on each rank. Functions go by name, tensors by value."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._running: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._running:
            self._start()
        for _, connection in self._running:
            connection.send((function, args))
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            waiting = {connection: rank for rank, (_, connection) in enumerate(self._running) if rank not in answers}
            ready = wait(list(waiting), TIMEOUT)
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank], error = self._answer(rank)
                if error:
                    self.end()
                    raise AssertionError(f"rank {rank}: {error}")
            if not ready:
                self.end()
                raise AssertionError(f"ranks {sorted(waiting.values())} hang")
        return [answers[rank] for rank in range(self.count)]

    def _answer(self, rank: int) -> tuple[Any, str]:
        try:
            return self._running[rank][1].recv()
        except EOFError:
            return None, "its process has ended"

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._running.append((process, ours))

    def end(self) -> None:
        for process, connection in self._running:
            connection.close()  # they leave by themselves, unless they hang
            process.join(0.5)
            process.kill()
            process.join()
        if self._running:
            self._folder.cleanup()
        self._running = []


@contextlib.contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """For as long as a fixture lives."""
    started = Ranks(count)
    try:
        yield started
    finally:
        started.end()


def rank() -> int:
    """Of the process that asks."""
    return torch.distributed.get_rank()


def _serve(number: int, count: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    # Shorter than ours, so that a rank that is left alone in a collective says so itself.
    options = {"rank": number, "world_size": count, "timeout": timedelta(seconds=TIMEOUT / 2)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", **options)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, args = connection.recv()
            try:
                connection.send((function(*args), ""))
            except Exception:
                connection.send((None, traceback.format_exc()))


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[tuple[int, Any]]]:
    """The (numel, group) of each `torch.distributed.all_reduce` of numbers inside. DDP's own go another way.

    Integers are left out: with them ranks find out, once, whether they have the same layers.
    """
    calls: list[tuple[int, Any]] = []
    before = torch.distributed.all_reduce

    @functools.wraps(before)
    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            calls.append((tensor.numel(), kwargs.get("group")))
        return before(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        yield calls
    finally:
        torch.distributed.all_reduce = before
