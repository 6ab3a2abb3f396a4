"""A monitored model as a picture: layers by operands, as heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from float8_compile.figure import new_figure
from float8_compile.operand_statistics import OPERANDS, OperandStatistics

MOST_LAYERS = 120
MOST_WITH_NUMBERS = 60
_LONGEST_NAME = 48
_NO_CAST = "0.88"  # grey


def plot(rows: Sequence[OperandStatistics], path: str | Path) -> None:
    """SQNR, and the shares that were flushed to zero and that saturated: a line for each layer, a column for each
    operand; the darker, the worse. Of more than 120 layers those with the lowest SQNR. The format follows the path's
    suffix.

    Raises ValueError where there are no rows, ModuleNotFoundError where matplotlib is missing.
    """
    layers = _layers(rows)
    if not layers:
        raise ValueError("nothing was recorded, so there is nothing to draw: run the model inside the monitor's block")
    operands = [operand for operand in OPERANDS if any(row.operand == operand for row in rows)]
    cells = {(row.layer, row.operand): row for row in rows}
    names = [_shortened(layer) for layer in layers]
    height = 2.4 + 0.2 * len(layers)
    figure = new_figure(1 + 0.075 * max(map(len, names)) + 3 * (0.4 + 0.45 * len(operands)), height)
    panels = figure.subplots(1, 3, sharey=True)

    def draw(axes: Any, what: str, name: str, unit: float, colours: str, least: float, most: float) -> None:
        seen = [[getattr(cells.get((layer, operand)), name, None) for operand in operands] for layer in layers]
        values = [[math.nan if value is None else value / unit for value in line] for line in seen]
        mesh = axes.pcolormesh(values, cmap=colours, vmin=least, vmax=most, edgecolors="white", linewidth=0.5)
        axes.set_facecolor(_NO_CAST)
        axes.set_xticks(_middles(operands), [o.replace(" for ", "\nfor ") for o in operands], fontsize=8, rotation=90)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        beyond = "max" if least == 0 else "both"
        bar = figure.colorbar(mesh, ax=axes, location="top", aspect=25, pad=0.1 / height, extend=beyond)
        bar.set_label(what, fontsize=9)
        bar.ax.tick_params(labelsize=7)
        if len(layers) <= MOST_WITH_NUMBERS:
            _write_numbers(axes, mesh, values)

    # The same colours in each picture, so that two can be compared. Rounding alone gives e4m3 31 dB, e5m2 25 dB.
    draw(panels[0], "SQNR, dB", "sqnr", 1, "Blues_r", 10, 35)
    draw(panels[1], "flushed to zero, %", "flushed", 0.01, "Oranges", 0, 20)
    draw(panels[2], "saturated, %", "saturated", 0.01, "Oranges", 0, 1)
    panels[0].set_yticks(_middles(layers), names, fontsize=8)
    panels[0].invert_yaxis()
    if len(layers) < len(all_layers := {row.layer for row in rows}):
        figure.suptitle(f"the {len(layers)} of {len(all_layers)} layers with the lowest SQNR", fontsize=10)
    figure.savefig(path, dpi=150)


def _layers(rows: Sequence[OperandStatistics]) -> list[str]:
    """Their names in the model's order, at most `MOST_LAYERS`."""
    worst: dict[str, float] = {}
    for row in rows:
        worst[row.layer] = min(worst.get(row.layer, math.inf), math.inf if row.sqnr is None else row.sqnr)
    shown = set(sorted(worst, key=worst.__getitem__)[:MOST_LAYERS])
    return [layer for layer in worst if layer in shown]


def _shortened(name: str) -> str:
    """The end of a long name, which tells layers apart."""
    return f"…{name[1 - _LONGEST_NAME :]}" if len(name) > _LONGEST_NAME else name or "(root)"


def _middles(cells: Sequence[str]) -> list[float]:
    return [number + 0.5 for number in range(len(cells))]


def _write_numbers(axes: Any, mesh: Any, values: Sequence[Sequence[float]]) -> None:
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                colour = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                axes.text(x + 0.5, y + 0.5, _short(value), ha="center", va="center", fontsize=6, color=colour)


def _short(value: float) -> str:
    """At most five characters."""
    if value == math.inf:
        return "exact"
    return f"{value:.1f}" if abs(value) >= 1 else "0" if value == 0 else "<.01" if 0 < value < 0.01 else f"{value:.2g}"
