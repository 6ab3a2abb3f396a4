"""The command line: finished `Settings` and a folder for results, or one line that says why not."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

import float8_compile as f8
from byte_lm import parallel
from byte_lm.optimizers import adamw8
from byte_lm.results import FILE, ROOT
from byte_lm.settings import BASELINE, OPTIMIZERS, PARALLEL, SIZES, Settings, UsageError

RUNS = ROOT / "runs"


@dataclass(frozen=True)
class Request:
    """`fingerprint` is that of the text which a resumed run began with; None for a new run."""

    settings: Settings
    folder: Path
    fingerprint: str | None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def size_help() -> str:
    return "; ".join(
        f"{name}: {s.layers} layers {s.width} wide, {s.steps} steps of {s.batch}x{s.context} bytes"
        for name, s in SIZES.items()
    )


def parser() -> Parser:
    names = ", ".join(f8.Recipe.names())
    parser = Parser(
        prog="scripts/train",
        description="Trains a byte-level language model on the same bytes in bf16 and in float8, "
        "and compares: a table, a picture and a JSON file in runs/.",
    )
    option = parser.add_argument
    option(
        "--recipe",
        action="append",
        metavar="NAME",
        help=f"{names}; repeat it or separate by commas (default: all). {BASELINE} always runs first, as the yardstick",
    )
    option("--steps", type=at_least(1), metavar="N", help="optimizer steps per recipe")
    option("--size", choices=SIZES, help=f"{size_help()} (default: base on a GPU, else small)")
    option("--batch-size", type=at_least(1), metavar="N", help="sequences per step")
    option("--seed", type=at_least(0), metavar="N", help="of weights and batches (default: 0)")
    option("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    kinds = "; ".join(f"{name}: {what}" for name, what in OPTIMIZERS.items())
    option("--optimizer", choices=OPTIMIZERS, help=f"of every recipe. {kinds} (default: {Settings.optimizer})")
    ways = "; ".join(f"{name}: {what}" for name, what in PARALLEL.items())
    option(
        "--nproc",
        type=at_least(1),
        metavar="N",
        help="processes that train each recipe together, on this machine, each with a GPU or a share of the cores; "
        "under torchrun those that it started",
    )
    option(
        "--parallel",
        choices=PARALLEL,
        help=f"how they share the work. {ways}. The loss is that of one process, up to rounding. Columns of bytes are "
        "those of one process, and a resumed run needs as many as before",
    )
    option(
        "--float8-all-gather",
        action="store_true",
        default=None,
        help="fsdp2 sends weights in float8, a byte an element, where the recipe multiplies them so",
    )
    option("--no-compile", action="store_true", default=None, help="run eagerly: slow, starts at once")
    option("--out", type=Path, metavar="DIR", help="where results go (default: runs/<time>)")
    option(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue an interrupted run, with its own settings (default: the newest in runs/)",
    )
    return parser


def known_recipes(asked: list[str] | None) -> tuple[str, ...]:
    """The yardstick and the recipes asked for, each once, in the order of asking."""
    names = [n.strip() for part in asked or f8.Recipe.names() for n in part.split(",") if n.strip()]
    for name in names:
        if name != BASELINE:
            f8.Recipe.from_name(name)
    return tuple(dict.fromkeys([BASELINE, *names]))


def new_run(options: argparse.Namespace) -> Request:
    size = options.size or ("base" if torch.cuda.is_available() else "small")
    settings = Settings(
        recipes=known_recipes(options.recipe),
        size=size,
        steps=options.steps or SIZES[size].steps,
        batch=options.batch_size or SIZES[size].batch,
        seed=options.seed or 0,
        data=options.data and str(Path(options.data).resolve()),
        compile=not options.no_compile,
        optimizer=options.optimizer or Settings.optimizer,
        parallel=options.parallel,
        processes=options.nproc or parallel.started() or 1,
        float8_all_gather=bool(options.float8_all_gather),
    )
    if options.parallel and not options.nproc and not parallel.started():
        raise UsageError(f"--parallel {options.parallel} is for several processes: --nproc N, or torchrun")
    folder = options.out or RUNS / time.strftime("%Y-%m-%d-%H%M%S")
    if (folder / FILE).exists():
        raise UsageError(f"{folder} holds a run already: --resume it, or give another --out")
    return Request(settings, folder, None)


def newest_run() -> Path:
    runs = sorted(RUNS.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError(f"--resume: there is no run in {RUNS}")
    return runs[-1].parent


def resumed_run(options: argparse.Namespace) -> Request:
    given = [name for name, value in vars(options).items() if value is not None]
    for name in sorted(set(given) - {"resume"}):
        option = name.replace("_", "-")
        raise UsageError(f"--resume continues a run with its own settings: leave out --{option}")
    folder = Path(options.resume) if options.resume else newest_run()
    if not any(folder.glob("*.pt")) or not (folder / FILE).exists():
        raise UsageError(f"--resume: no checkpoint in {folder}")
    saved = json.loads((folder / FILE).read_text(encoding="utf-8"))
    settings = Settings(**{**saved["settings"], "recipes": tuple(saved["settings"]["recipes"])})
    if saved["shape"] != asdict(settings.shape):
        raise UsageError(f"--resume: the size {settings.size!r} has changed since the run began")
    return Request(settings, folder, saved["text"]["fingerprint"])


def parse(arguments: list[str] | None) -> Request:
    options = parser().parse_args(arguments)
    try:
        request = new_run(options) if options.resume is None else resumed_run(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    parallel.check(request.settings)
    if request.settings.optimizer == "adamw8":
        adamw8()  # before the text is read and a folder made, and before a checkpoint with its states is loaded
    return request
