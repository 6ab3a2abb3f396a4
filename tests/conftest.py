"""Fixtures that several files of tests ask for by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

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
