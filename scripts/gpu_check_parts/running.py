"""One part in a process of its own: its output as it comes, its time limit, and what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.record import ROOT
from gpu_check_parts.parts import TESTS, Part

OK, FAILED, TIMED_OUT, SKIPPED, STOPPED, NOT_RUN = "ok", "failed", "timed out", "skipped: no GPU", "stopped", "not run"
TAIL = 30  # lines of output that are kept
GRACE = 10.0  # seconds in which a part that is told to stop may write what it has


@dataclass
class Result:
    """What came of a part. note: for a person, such as how many tests there were."""

    name: str
    command: str
    limit: float
    status: str = NOT_RUN
    seconds: float = 0.0
    note: str = ""
    tail: list[str] = field(default_factory=list)


def run(part: Part, limit: float, folder: Path, tell: Callable[[str], object]) -> Result:
    """Runs it for so many seconds at most. Ctrl-C ends it too, gives STOPPED, and is not raised."""
    result = Result(part.name, " ".join(["python", *part.command[1:]]), limit)
    for old in folder.glob(f"{part.name}.*"):
        old.unlink()
    lines: list[str] = []
    start = time.monotonic()
    process = subprocess.Popen(
        part.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        start_new_session=True,  # so that all of its processes can be ended, and Ctrl-C is heard here first
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    reader = threading.Thread(target=_read, args=(process, lines, tell), daemon=True)
    reader.start()
    try:
        code = process.wait(limit)
        result.status = OK if code == 0 else FAILED
        result.note = "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        result.status, result.note = TIMED_OUT, f"after {limit:.0f} s"
    except KeyboardInterrupt:
        result.status = STOPPED
    finally:
        _end(process)
    reader.join(GRACE)
    result.seconds = round(time.monotonic() - start, 1)
    result.tail = lines[-TAIL:]
    (folder / f"{part.name}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if part.name == TESTS:
        _judge_tests(result, folder / part.leaves)
    if result.status == OK and not (folder / part.leaves).exists():
        result.status, result.note = FAILED, f"left no {part.leaves}"
    return result


def _read(process: subprocess.Popen[str], lines: list[str], tell: Callable[[str], object]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip())
            tell(lines[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """The whole group: first as Ctrl-C would, so that what is done is written."""
    for sent, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
        if process.poll() is None:
            os.killpg(process.pid, sent)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind


def _judge_tests(result: Result, report: Path) -> None:
    """Tests that are all skipped have shown nothing, and a run without tests neither."""
    try:
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError, StopIteration):
        return
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    words = {"passed": passed, "failed": count["failures"] + count["errors"], "skipped": count["skipped"]}
    counts = [f"{number} {word}" for word, number in words.items() if number]
    result.note = ", ".join([*counts, *filter(None, [result.note])])
    if result.status == OK and not passed:
        result.status = SKIPPED if count["skipped"] else FAILED
