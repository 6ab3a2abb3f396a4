"""What the benchmarks' commands share: their arguments, what they refuse, and what they show while they work."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.record import RESULTS
from float8_compile.variants import check, quiet, variant

# What a GPU's user is told once, and what is no news here.
EXPECTED_WARNINGS = ("a Float8Linear runs eagerly on a GPU", "TensorFloat32 tensor cores for float32 matrix")


def parser_of(name: str, description: str | None, contenders: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """With what all of them take: --rounds, --contenders and --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, default=rounds, help="default: %(default)s")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", default=contenders, help=", ".join(contenders))
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS, help="default: benchmarks/results")
    return parser


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")


def count(text: str) -> int:
    """An argument that is 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def known(
    parser: argparse.ArgumentParser, names: Sequence[str], *, also: Sequence[str] = (), flag: str = ""
) -> list[str]:
    """The contenders, each once; ends the command where one is none, or needs torchao and that is missing.

    also: those that are no variants. flag: what may stand behind a variant's name.
    """
    try:
        with quiet():
            for name in names:
                if name not in also:
                    variant(lambda: None, check(name.removesuffix(flag)))
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return list(dict.fromkeys(names))


def command_line(name: str, arguments: Sequence[str] | None) -> str:
    """What was typed, for whoever wants the same again."""
    return " ".join(["python -m", f"benchmarks.{name}", *(sys.argv[1:] if arguments is None else arguments)])


def reason(error: Exception) -> str:
    """Why something failed, in a line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextlib.contextmanager
def without_expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        yield


class Live:
    """A bar for each thing that is measured on a terminal, a line for each that is done everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description:>5}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Live:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def begin(self, what: object, total: int) -> None:
        """Of `total` rounds, or other steps."""
        self.task = self.bars.add_task(str(what), total=total, status="")

    def prepare(self, what: str) -> None:
        self.bars.update(self.task, status=f"preparing {what}")

    def round(self, done: int) -> None:
        self.bars.update(self.task, completed=done, status="rounds")

    def end(self, words: str) -> None:
        """With what has come out, in a line."""
        self.bars.update(self.task, status="done")
        self.say(words)

    def say(self, words: str) -> None:
        self.console.print(words, highlight=False, soft_wrap=True)
