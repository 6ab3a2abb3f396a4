"""Ctrl-C, heard between two steps: weights, optimizer and losses always belong to the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Remembers the first Ctrl-C, or raises KeyboardInterrupt at once while `at_once` is set:
    compiling takes long and changes nothing that would have to be kept. A second Ctrl-C raises in
    any case, and leaves the last checkpoint as it is."""

    def __init__(self) -> None:
        self.heard = False
        self.at_once = True

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        impatient = self.heard
        self.heard = True
        if self.at_once or impatient:
            raise KeyboardInterrupt


@contextmanager
def listening() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
