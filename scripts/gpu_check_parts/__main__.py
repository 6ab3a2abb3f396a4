"""`scripts/gpu_check`: run the parts, and after each say what came of all so far."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, circumstances, write_json
from float8_compile.doctor import doctor
from gpu_check_parts.parts import Part, parts
from gpu_check_parts.running import OK, SKIPPED, STOPPED, Result, run

FOLDER = ROOT / "runs" / "gpu_check"
SUMMARY = "summary.json"
ARCHIVE = "gpu_check.tar.gz"
LEAST = 10.0  # seconds; with less a part isn't begun


def parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """The options; names: of all parts."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Runs what only a machine with a GPU can show: tests/gpu, the benchmarks of layers, blocks and "
        "memory, CUDA graphs, and the preview held against the kernels that really run. Each part is a process with a "
        "time limit; files and summary.json are written as it goes, in runs/gpu_check/. Where the variable OUT names a "
        f"folder, it gets summary.json, the pictures, and everything in {ARCHIVE}. Exit code 0 if every part is ok.",
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="that all may take together (default: 10)")
    parser.add_argument("--dry-run", action="store_true", help="every part in small, also on a CPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=FOLDER, help="default: runs/gpu_check")
    return parser


def table(results: Sequence[Result]) -> Table:
    """What came of each part."""
    drawn = Table(box=SIMPLE_HEAD)
    for column in ("part", "result", "seconds", ""):
        drawn.add_column(column, justify="right" if column == "seconds" else "left")
    for result in results:
        drawn.add_row(result.name, result.status, f"{result.seconds:.0f}", result.note)
    return drawn


def deliver(folder: Path, to: Path) -> None:
    """For machines that bring back few files: the summary, the pictures, and one archive of everything."""
    to.mkdir(parents=True, exist_ok=True)
    for path in [folder / SUMMARY, *folder.glob("*.png")]:
        shutil.copy(path, to / path.name)
    unfinished = to / f"{ARCHIVE}.unfinished"
    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(folder, arcname="gpu_check")
    unfinished.replace(to / ARCHIVE)


def run_all(
    chosen: Sequence[Part], minutes: float, folder: Path, about: dict[str, object], console: Console
) -> list[Result]:
    """One after the other, as long as there is time."""
    results = [Result(part.name, " ".join(part.command), part.limit) for part in chosen]
    end = time.monotonic() + 60 * minutes
    given = os.environ.get("OUT")
    for number, part in enumerate(chosen):
        left = end - time.monotonic()
        if left < LEAST:
            results[number].note = "no time was left"
        else:
            limit = min(part.limit, left)
            console.print(f"\n== {part.name}: {part.what}, {limit:.0f} s at most", style="bold", highlight=False)
            results[number] = run(part, limit, folder, lambda line: console.out(line, highlight=False))
        write_json(folder / SUMMARY, {**about, "parts": [asdict(result) for result in results]})
        if given:
            deliver(folder, Path(given))
        if results[number].status == STOPPED:
            break
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every part is ok, or skipped in a dry run; 130 after Ctrl-C."""
    options = parser([part.name for part in parts(FOLDER, dry=True)])
    given = options.parse_args(arguments)
    if not torch.cuda.is_available() and not given.dry_run:
        options.error("torch sees no GPU here; --dry-run tries every part on the CPU")
    console = Console()
    given.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["scripts/gpu_check", *(sys.argv[1:] if arguments is None else arguments)])
    about: dict[str, object] = {**circumstances(command), "dry_run": given.dry_run, "doctor": doctor().splitlines()}
    chosen = [part for part in parts(given.out.resolve(), given.dry_run) if part.name in given.parts]
    results = run_all(chosen, given.minutes, given.out, about, console)
    console.print(table(results))
    console.print(f"numbers, pictures and logs: {given.out}", highlight=False, soft_wrap=True)
    if any(result.status == STOPPED for result in results):
        return 130
    good = (OK, SKIPPED) if given.dry_run else (OK,)
    return int(any(result.status not in good for result in results))


if __name__ == "__main__":
    sys.exit(main())
