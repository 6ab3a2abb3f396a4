"""The overhead benchmark's results as a table, a picture and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.look import bars, colour, picture
from benchmarks.record import made_by, markdown, write, write_json
from float8_compile.variants import AS_BUILT, TORCHAO

IMPORTS, CONVERSION, EAGER, COMPILE = PARTS = ("imports", "conversion", "eager", "compile")
COLD, WARM, WARMEST = STARTS = ("cold", "warm", "warm, AOTAutograd too")

Found = dict[str, Any]  # of a part, by contender

# What the table has in its columns, and what the picture draws: (part, heading, keys in a contender's results).
COLUMNS = (
    (IMPORTS, "import, s", ("median",)),
    (CONVERSION, "convert, ms", ("median",)),
    (EAGER, "forward, us", ("forward", "median")),
    (EAGER, "+ backward, us", ("forward + backward", "median")),
    (COMPILE, "nodes forward", ("forward",)),
    (COMPILE, "nodes backward", ("backward",)),
    (COMPILE, "compile cold, s", (COLD,)),
    (COMPILE, "compile warm, s", (WARM,)),
    (COMPILE, "warm, AOTAutograd too, s", (WARMEST,)),
)


def value(found: Mapping[str, Found], part: str, name: str, keys: Sequence[str]) -> float | None:
    """A number of the table; None where it was not measured."""
    entry: Any = found.get(part, {}).get(name)
    for key in keys:
        entry = (entry or {}).get(key)
    return entry


def table(found: Mapping[str, Found], names: Sequence[str]) -> str:
    """Markdown: what was measured of each contender."""
    columns = [column for column in COLUMNS if column[0] in found]

    def cell(part: str, name: str, keys: Sequence[str]) -> str:
        number = value(found, part, name, keys)
        return "-" if number is None else f"{number:,.0f}" if number >= 100 or part == EAGER else f"{number:.2f}"

    return markdown(
        [
            {"": name} | {heading: cell(part, name, keys) for part, heading, keys in columns}
            for name in names
            if any(value(found, part, name, keys) is not None for part, _, keys in columns)
        ]
    )


def draw(path: Path, found: Mapping[str, Found], names: Sequence[str], about: Mapping[str, Any]) -> None:
    """A picture for each column of the table."""
    of_column = {
        column: [name for name in names if value(found, column[0], name, column[2]) is not None] for column in COLUMNS
    }
    columns = [column for column, shown in of_column.items() if shown]
    drawn = [of_column[column] for column in columns]
    pairs = [drawn[first : first + 2] for first in range(0, len(drawn), 2)]
    heights = [0.9 + 0.26 * max(map(len, pair)) for pair in pairs]
    with picture(path, 11, 0.6 + sum(heights), f"{about['title']}\n{about['machine']}") as figure:
        grid = figure.subplots(len(pairs), 2, squeeze=False, height_ratios=heights).flatten()
        for axes, (part, heading, keys), shown in zip(grid, columns, drawn, strict=False):
            values = [value(found, part, name, keys) or 0.0 for name in shown]
            bars(axes, shown, {heading: (colour(AS_BUILT), values)})
            for bar, name in zip(axes.patches, shown, strict=True):
                bar.set(color=colour(name), alpha=0.5 if name.startswith(TORCHAO) else 1.0)
            axes.set_title(heading, loc="left", fontsize=10)
        for axes in grid[len(columns) :]:
            axes.set_visible(False)


def leave(folder: Path, name: str, found: Mapping[str, Found], about: Mapping[str, Any]) -> None:
    """The three files of this name, of what there is so far."""
    names = list(dict.fromkeys(contender for of in found.values() for contender in of))
    if not names:
        return
    write_json(folder / f"{name}.json", {**about, **found})
    words = f"{made_by(about)} {about['method']}"
    write(folder / f"{name}.md", f"{words}\n\n{table(found, names)}")
    draw(folder / f"{name}.png", found, names, about)
