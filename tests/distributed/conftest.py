"""Tests with several processes, which import the vocabulary of the others' tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # delayed_checks.py, also in the processes started here
