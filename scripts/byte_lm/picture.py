"""The loss curves, and below them what the eye cannot see there: the distance to bf16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from byte_lm.progress import Progress
from byte_lm.results import percent_above
from byte_lm.settings import BASELINE, Settings

# Okabe and Ito's colours, which colour-blind readers can tell apart; the yardstick is black.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PROMISE = 1.0
POINTS: dict[str, Any] = {"markersize": 4, "markerfacecolor": "white"}
TITLE = "Training a byte-level language model: the same bytes in each recipe"


def smooth(losses: Sequence[float], window: int) -> NDArray[np.float64]:
    """The mean of the last `window` losses, of fewer at the start."""
    total = np.cumsum(np.insert(np.asarray(losses, dtype=np.float64), 0, 0.0))
    end = np.arange(1, len(losses) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)


def draw_losses(axes: Axes, progresses: Sequence[Progress], window: int) -> None:
    for progress, colour in zip(progresses, cycle(COLOURS)):
        steps = np.arange(1, progress.done + 1)
        axes.plot(steps, progress.losses, color=colour, alpha=0.12, linewidth=0.8)
        axes.plot(steps, smooth(progress.losses, window), color=colour, label=progress.recipe)
        if progress.validation:
            at, losses = zip(*progress.validation, strict=True)
            axes.plot(at, losses, "o", color=colour, **POINTS)
    axes.plot([], [], "o", color="grey", label="held-out text", **POINTS)
    axes.set_ylabel("loss, nats per byte")
    axes.legend(frameon=False)


def draw_differences(axes: Axes, progresses: Sequence[Progress]) -> None:
    baseline = dict(progresses[0].validation)
    axes.axhspan(-PROMISE, PROMISE, color="#000000", alpha=0.06, linewidth=0)
    axes.text(0.995, 0.03, f"grey: within {PROMISE:g} %", transform=axes.transAxes, ha="right", fontsize=8)
    for progress, colour in zip(progresses, cycle(COLOURS)):
        points = [(step, percent_above(loss, baseline[step])) for step, loss in progress.validation if step in baseline]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, **POINTS)
    axes.set_ylabel(f"held-out loss\nto {BASELINE}, %")
    axes.set_xlabel("step")


def draw(path: Path, progresses: Sequence[Progress], settings: Settings, subtitle: str) -> None:
    """Writes a PNG. Nothing is shown on a screen, so none is needed."""
    window = max(1, settings.steps // 25)
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 6.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        draw_losses(above, progresses, window)
        draw_differences(below, progresses)
        for axes in (above, below):
            axes.grid(alpha=0.25, linewidth=0.6)
        above.set_title(f"{TITLE}\n{subtitle}", loc="left", fontsize=10)
        below.set_xlim(0, settings.steps * 1.01)
        figure.savefig(path, dpi=150)
