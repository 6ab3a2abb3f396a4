"""How the pictures look: Okabe and Ito's hues, which colour-blind readers can tell apart, and few lines around."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import recipe_of
from float8_compile.variants import AS_BUILT, CACHED, KEEP, TORCHAO

# By recipe; whose it is, and what it does with its weights, is told by lines and markers.
COLOURS = {
    AS_BUILT: "#000000",
    "nn.Linear": "#000000",
    "tensorwise": "#D55E00",
    "rowwise": "#0072B2",
    "rowwise_with_gw_hp": "#009E73",
    "delayed": "#CC79A7",
}
OTHER = "#E69F00"


def colour(name: str) -> str:
    """A contender's."""
    return COLOURS.get(recipe_of(name), OTHER)


def marker(name: str) -> str:
    """A contender's: torchao's a square, ours a circle, or a triangle where weights are cached or kept."""
    if name.startswith(TORCHAO):
        return "s"
    return "v" if name.endswith(CACHED) else "^" if name.endswith(KEEP) else "o"


@contextlib.contextmanager
def picture(path: Path, width: float, height: float, title: str, dpi: int = 130) -> Iterator[Any]:
    """A matplotlib Figure, written as a PNG at the end. Nothing is shown on a screen, so none is needed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        lines = (textwrap.fill(line, int(13 * width)) for line in title.splitlines())
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)


def bars(axes: Any, names: Sequence[str], groups: Mapping[str, tuple[str, Sequence[float | None]]]) -> None:
    """Lying bars, with a number at each: for each name one of every group, which has a label, a colour and values."""
    height = 0.76 / len(groups)
    ends = [value for _, values in groups.values() for value in values if value is not None]
    form = ",.0f" if max(ends, default=0) >= 100 else ".1f" if max(ends, default=0) >= 10 else ".2f"
    for number, (label, (hue, values)) in enumerate(groups.items()):
        offset = (number - (len(groups) - 1) / 2) * height
        places = [place + offset for place in range(len(names))]
        axes.barh(places, [value or 0 for value in values], height=0.94 * height, color=hue, label=label)
        for value, place in zip(values, places, strict=True):
            axes.text(value or 0, place, f" {value:{form}}" if value is not None else " -", va="center", fontsize=7.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.13 * max(ends, default=1))
