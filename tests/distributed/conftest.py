"""Tests with several processes, which import the vocabulary of the others' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # delayed_checks.py, also in the processes started here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share its ranks, so that one of xdist's workers starts them, once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
