"""`scripts/train`: parse, read the text, train each recipe in turn, show what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from byte_lm import arguments, parallel, picture, results
from byte_lm.arguments import Request
from byte_lm.data import Text, load_text
from byte_lm.display import Live, results_table
from byte_lm.interrupt import Interrupt, listening
from byte_lm.parallel import Team
from byte_lm.progress import Progress
from byte_lm.settings import Settings, UsageError
from byte_lm.training import Trainer, load_progress, start_compiler, train
from float8_compile.machine import processor


def read_text(request: Request) -> Text:
    text = load_text(request.settings.data, request.settings.shape.context)
    if request.fingerprint not in (None, text.fingerprint):
        raise UsageError(f"--resume: {text.name} has changed since the run began")
    return text


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None


class Run:
    """All recipes of one request. `progresses` holds those that have begun, now or before, in order."""

    def __init__(self, request: Request, text: Text, team: Team) -> None:
        self.settings, self.folder, self.text, self.team = request.settings, request.folder, text, team
        self.progresses: dict[str, Progress] = team.told(
            {
                recipe: load_progress(self.checkpoint(recipe))
                for recipe in self.settings.recipes
                if self.checkpoint(recipe).exists()
            }
        )

    def checkpoint(self, recipe: str) -> Path:
        return self.folder / f"{recipe}.pt"

    def train_all(self, live: Live, interrupt: Interrupt) -> None:
        if self.settings.compile:
            start_compiler()
        for recipe in self.settings.recipes:
            earlier = self.progresses.get(recipe)
            if earlier is not None and earlier.complete:
                live(earlier)
            else:
                self.train(recipe, live, interrupt)
            self.write()

    def train(self, recipe: str, live: Live, interrupt: Interrupt) -> None:
        # Every recipe is a first compilation, and none meets the limit on recompilations.
        torch.compiler.reset()
        trainer = Trainer(self.settings, recipe, self.text, self.team)
        if recipe in self.progresses:
            trainer.load(self.checkpoint(recipe))
        self.progresses[recipe] = trainer.progress
        train(trainer, self.checkpoint(recipe), live, interrupt)

    def write(self) -> None:
        if not self.team.leads:
            return
        results.write(self.folder / results.FILE, self.settings, self.text, list(self.progresses.values()))

    def show(self, console: Console) -> None:
        """The table, on screen and as text, and the picture; nothing where nothing was trained."""
        begun = [p for p in self.progresses.values() if p.losses]
        if not begun or not self.team.leads:
            return
        table = results_table(results.rows(begun, self.settings), self.settings)
        console.print(table)
        with open(self.folder / "table.txt", "w", encoding="utf-8") as file:
            Console(file=file, width=80).print(table)
        picture.draw(self.folder / "loss.png", begun, self.settings, subtitle(self.settings))
        console.print(f"table, picture and numbers: {self.folder}", highlight=False, soft_wrap=True)

    def way_on(self) -> str:
        if not any(self.folder.glob("*.pt")):
            return "nothing was trained yet"
        return f"continue with: scripts/train --resume {self.folder}"


def beginning(request: Request, text: Text) -> str:
    train, held_out = (len(part) / 1e6 for part in (text.train, text.validation))
    return f"{text.name}: {train:.2f} MB to train on, {held_out:.2f} MB held out; results: {request.folder}"


def subtitle(settings: Settings) -> str:
    shape = settings.shape
    together = f"{settings.processes} processes ({settings.parallel}), " if settings.parallel else ""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return (
        f"{shape.layers} layers, {shape.width} wide, {results.tokens_per_step(settings)} bytes "
        f"a step, {settings.optimizer}, {together}seed {settings.seed}, on {where}"
    )


def train_all(request: Request, text: Text, team: Team) -> int:
    console = Console(quiet=not team.leads)
    run, code = Run(request, text, team), 0
    with listening() as interrupt:
        try:
            run.write()
            console.print(beginning(request, text), highlight=False, soft_wrap=True)
            with Live(console, request.settings) as live:
                run.train_all(live, interrupt)
        except KeyboardInterrupt:
            code = 130
    run.write()
    run.show(console)
    if code:
        console.print(f"interrupted; {run.way_on()}", highlight=False, soft_wrap=True)
    return code


def arguments_of_each(request: Request, argv: Sequence[str]) -> list[str]:
    """With the folder, whose name holds the time."""
    if request.fingerprint is not None:
        return ["--resume", str(request.folder)]
    return [*argv, "--out", str(request.folder)]


def main(argv: list[str] | None = None) -> int:
    try:
        request = arguments.parse(argv)
        text = read_text(request)
        if parallel.will_lead():
            make_folder(request.folder)
    except UsageError as error:
        if parallel.will_lead():
            print(f"scripts/train: {error}", file=sys.stderr)
        return 2
    settings = request.settings
    if settings.parallel and not parallel.started():
        return parallel.launch(settings.processes, arguments_of_each(request, sys.argv[1:] if argv is None else argv))
    team = parallel.join(settings.parallel)
    code = train_all(request, text, team)
    if code == 0:  # an interrupt finds processes anywhere
        team.leave()
    return code


if __name__ == "__main__":
    sys.exit(record(main)())  # what a process of several died of reaches the one that started it
