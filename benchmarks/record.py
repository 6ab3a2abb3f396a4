"""Numbers with their circumstances: JSON that says which machine, versions and commit, and the table made from it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from float8_compile.machine import commit, processor, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def circumstances(command: str) -> dict[str, Any]:
    """What a later reader needs in order to judge the numbers, and to make them again."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "versions": versions(),
        "machine": machine(),
    }


def machine() -> str:
    """In words: "x86_64 (AMD EPYC), 2 cores, no GPU, Linux"."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()} ({processor()}), {os.cpu_count()} cores, {gpu}, {platform.system()}"


def made_by(about: Mapping[str, Any]) -> str:
    """Circumstances in a sentence, for the head of a table."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"Made by `{about['command']}` with {versions}, on {about['machine']}."


def write(path: Path, text: str) -> None:
    """All of it or nothing: an interrupted run leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented, so that two runs can be compared line by line."""
    write(path, json.dumps(content, indent=2) + "\n")


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of the rows' values, numbers to the right, the first column to the left."""
    header = list(rows[0])
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *([row[name] for name in header] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
