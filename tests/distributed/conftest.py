"""Tests with several processes, which import the vocabulary of the others' tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # delayed_checks.py, also in the processes started here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share its ranks, so that one of xdist's workers starts them, once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def _ranks(count: int) -> Any:
    """A fixture: as many processes, which the tests of a file share."""

    @pytest.fixture(scope="module")
    def started() -> Iterator[Any]:
        from ranks import ranks

        with ranks(count) as processes:
            yield processes

    return started


two, three, four = _ranks(2), _ranks(3), _ranks(4)
