"""Tests that need a GPU with float8 GEMMs; elsewhere each is skipped, and says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # oracles.py, also where only this folder is collected

OLDEST = (8, 9)  # Ada; Hopper is (9, 0)


def obstacle() -> str:
    """Why no float8 GEMM runs here, or nothing."""
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST and torch.version.hip is None:
        return f"{torch.cuda.get_device_name()} has compute capability {capability}, float8 GEMMs need {OLDEST}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := obstacle():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
