"""The tables and the picture of benchmarks/block.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.block_process import CHECKPOINTED
from benchmarks.interleaved import quantiles, ratio
from benchmarks.look import bars, picture
from benchmarks.record import made_by, markdown, write, write_json
from float8_compile.variants import AS_BUILT

SIDES = {"as it is": "", "checkpointed": CHECKPOINTED}
HUES = {"as it is": "#0072B2", "checkpointed": "#56B4E9", "cold": "#D55E00", "warm": "#E69F00"}
# Each has a column for both sides.
TABLES = {
    "step": ("ms", "quartiles", "over bf16"),
    "memory": ("after forward, MB", "peak, MB"),
    "first step, with compilation": ("cold, s", "warm, s"),
}


@dataclass
class Row:
    """One case: a contender, checkpointed or not. What there isn't yet is empty.

    cold, warm: seconds of first steps. seconds: of a step, by round. nbytes: "after forward" and "peak". failed: why.
    """

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None


@dataclass
class Result:
    """One model, its rows by contender and CHECKPOINTED or not."""

    model: str
    rows: dict[str, Row]

    @property
    def contenders(self) -> list[str]:
        return [name for name in self.rows if not name.endswith(CHECKPOINTED)]


def figures(result: Result, case: str) -> dict[str, Any]:
    """Of one case, as numbers; None for what there isn't. The speed-up is over bf16 on the same side."""
    row = result.rows[case]
    base = result.rows.get(AS_BUILT + (CHECKPOINTED if case.endswith(CHECKPOINTED) else ""))
    rounds = 0 if base is None else min(len(base.seconds), len(row.seconds))
    times = {key: 1e3 * value for key, value in quantiles(row.seconds).items()} if row.seconds else {}
    return {
        "ms": {key: round(value, 4) for key, value in times.items()} or None,
        "over bf16": round(ratio(base.seconds[:rounds], row.seconds[:rounds]), 3) if base and rounds else None,
        "after forward": row.nbytes.get("after forward"),
        "peak": row.nbytes.get("peak"),
        "cold": round(statistics.median(row.cold), 2) if row.cold else None,
        "warm": round(statistics.median(row.warm), 2) if row.warm else None,
        "colds": [round(seconds, 2) for seconds in row.cold],
        "warms": [round(seconds, 2) for seconds in row.warm],
        "failed": row.failed,
    }


def leave(folder: Path, name: str, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    models = {
        result.model: {
            contender: {side: figures(result, contender + behind) for side, behind in SIDES.items()}
            for contender in result.contenders
        }
        for result in results
    }
    write_json(folder / f"{name}.json", {**about, "models": models})
    write(folder / f"{name}.md", report(results, about))
    draw(folder / f"{name}.png", results, about)


def report(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Markdown: for each model a table of steps, of bytes, and of first steps; then what failed."""
    lines = [f"{made_by(about)} {about['method']}"]
    for result in results:
        rows = {
            contender: [in_words(figures(result, contender + behind)) for behind in SIDES.values()]
            for contender in result.contenders
        }
        lines.append(f"\n{result.model}")
        for title, columns in TABLES.items():
            wanted = [(column, side) for column in columns for side in range(len(SIDES))]
            table = [
                {title: contender}
                | {column + list(SIDES.values())[side]: sides[side][column] for column, side in wanted}
                for contender, sides in rows.items()
            ]
            if any(word != "-" for row in table for word in list(row.values())[1:]):
                lines.append(f"\n{markdown(table)}")
        failed = {case: row.failed for case, row in result.rows.items() if row.failed}
        lines += [f"\n{case} failed: {why}" for case, why in failed.items()]
    return "\n".join(lines)


def in_words(figures: Mapping[str, Any]) -> dict[str, str]:
    """The same for people."""

    def optional(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else f"{value / unit:{form}}"

    times = figures["ms"] or {}
    return {
        "ms": optional(times.get("median"), ",.2f"),
        "quartiles": f"{times['p25']:,.2f} to {times['p75']:,.2f}" if times else "-",
        "over bf16": optional(figures["over bf16"], ".2f"),
        "after forward, MB": optional(figures["after forward"], ",.2f", 1e6),
        "peak, MB": optional(figures["peak"], ",.2f", 1e6),
        "cold, s": optional(figures["cold"], ".1f"),
        "warm, s": optional(figures["warm"], ".1f"),
    }


def line(result: Result, case: str) -> str:
    """What there is of a case."""
    if result.rows[case].failed:
        return f"{result.model}, {case} failed: {result.rows[case].failed}"
    words = in_words(figures(result, case))
    return f"{result.model}, {case}: {', '.join(f'{key} {word}' for key, word in words.items() if word != '-')}"


def draw(path: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """Writes a PNG, a row of pictures for each model: speed-ups, bytes, and first steps if there are any."""
    pictures = {
        "over bf16": ("times as fast as bf16", 1),
        "after forward": ("MB alive after forward", 1e6),
        "peak": ("MB, peak", 1e6),
    }
    heights = [1.1 + 0.42 * len(result.contenders) for result in results]
    compiled = any(row.cold for result in results for row in result.rows.values())
    with picture(path, 2.5 + 3.2 * (3 + compiled), 1.2 + sum(heights), f"A block, on {about['machine']}") as figure:
        grid = figure.subplots(len(results), 3 + compiled, squeeze=False, sharey="row", height_ratios=heights)
        for row, result in zip(grid, results, strict=True):
            names = result.contenders
            sides = {side: [figures(result, name + behind) for name in names] for side, behind in SIDES.items()}
            for axes, (key, (label, unit)) in zip(row, pictures.items(), strict=False):
                values = {side: [_divided(of[key], unit) for of in all_of] for side, all_of in sides.items()}
                bars(axes, names, {side: (HUES[side], of) for side, of in values.items()})
                axes.set_xlabel(label)
            if compiled:
                first = {key: (HUES[key], [of[key] for of in sides["as it is"]]) for key in ("cold", "warm")}
                bars(row[3], names, first)
                row[3].set_xlabel("s, first step with compilation, as it is")
            row[0].set_title(result.model, loc="left", fontsize=10)
            row[0].axvline(1, color="black", linewidth=0.8)
        legends = [axes.get_legend_handles_labels() for axes in grid[0, ::3]]
        handles, labels = ([thing for legend in legends for thing in legend[part]] for part in (0, 1))
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _divided(number: float | None, unit: float) -> float | None:
    return None if number is None else number / unit
