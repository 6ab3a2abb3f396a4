"""Python in a process of its own: what an import brings, and what a user finds who has only torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *arguments: str, blocked: tuple[str, ...] = (), warnings: str = "error") -> str:
    """What the code prints. `blocked` modules can't be imported there. AssertionError with its errors if it fails."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", block + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
