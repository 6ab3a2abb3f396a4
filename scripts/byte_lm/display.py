"""What a person sees: a progress bar per recipe while they train, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from byte_lm.progress import Progress
from byte_lm.results import Row, tokens_per_step
from byte_lm.settings import Settings

SECONDS_BETWEEN_LINES = 10.0


def status(progress: Progress, settings: Settings) -> str:
    """What happens now, in one line."""
    if not progress.losses:
        return "compiling" if settings.compile else "starting"
    speed = progress.tokens_per_second(tokens_per_step(settings))
    held_out = shown(progress.validation_loss, ".3f")
    return f"loss {progress.losses[-1]:.3f}  held out {held_out}  {shown(speed, ',.0f')} tokens/s"


class Live:
    """Bars on a terminal, a line every ten seconds elsewhere: call it when something changed."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self.console, self.settings = console, settings
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.last_line = 0.0

    def __enter__(self) -> Live:
        for recipe in self.settings.recipes:
            self.tasks[recipe] = self.bars.add_task(recipe, start=False, total=self.settings.steps, status="waiting")
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def __call__(self, progress: Progress) -> None:
        text = status(progress, self.settings)
        task = self.tasks[progress.recipe]
        if not self.bars.tasks[task].started:
            self.bars.start_task(task)
        self.bars.update(task, completed=progress.done, status=text)
        if not self.console.is_terminal:
            self._line(progress, text)

    def _line(self, progress: Progress, text: str) -> None:
        now = time.monotonic()
        under_way = progress.losses and not progress.complete
        if under_way and now - self.last_line < SECONDS_BETWEEN_LINES:
            return
        self.last_line = now
        self.console.print(f"{progress.recipe:18} {progress.done:>5}/{progress.steps}  {text}", highlight=False)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def label(row: Row, settings: Settings) -> str:
    unfinished = f"\n  {row.steps_done} of {settings.steps} steps" if row.steps_done < settings.steps else ""
    return row.recipe + unfinished


COLUMNS: dict[str, Callable[[Row], str]] = {
    "training\nloss": lambda row: shown(row.training_loss, ".4f"),
    "held-out\nloss": lambda row: shown(row.validation_loss, ".4f"),
    "to bf16\n%": lambda row: shown(row.to_baseline_percent, "+.2f"),
    "tokens/s": lambda row: shown(row.tokens_per_second, ",.0f"),
    "x bf16": lambda row: shown(row.speed_to_baseline, ".2f"),
    "kept for\nbackward\nMB": lambda row: shown(row.saved_megabytes, ".1f"),
    "compile\ns": lambda row: shown(row.compile_seconds, ".1f"),
}


def title(rows: Sequence[Row], settings: Settings) -> str:
    """With the size of the optimizer's states, which no recipe changes; of several processes, the first one's."""
    size = next((row.optimizer_bytes for row in rows if row.optimizer_bytes is not None), None)
    states = f" ({size / 1e6:,.1f} MB of states)" if size is not None else ""
    run = f"{settings.size}: {settings.steps} steps of {tokens_per_step(settings)} tokens"
    together = f", {settings.processes} x {settings.parallel}" if settings.parallel else ""
    return f"{run}{together}, {settings.optimizer}{states}"


def results_table(rows: Sequence[Row], settings: Settings) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(
        title=title(rows, settings),
        caption="A token is a byte. Losses in nats per token: training's is the mean of the last "
        "tenth of the steps. Speed is that of the median step.",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
    )
    table.add_column("recipe", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(label(row, settings), *(cell(row) for cell in COLUMNS.values()))
    return table
