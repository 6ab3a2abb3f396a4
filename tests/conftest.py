"""Fixtures that several files of tests ask for by name."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def afresh() -> Iterator[None]:
    """Own random numbers and no graphs of other tests; without torch's remark on checkpoint's context_fn."""
    logger = logging.getLogger("torch._dynamo")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch._dynamo.reset()
        before = logger.level
        logger.setLevel(logging.ERROR)
        yield
        logger.setLevel(before)
        torch._dynamo.reset()


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which it is not installed."""
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
