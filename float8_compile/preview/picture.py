"""A preview as a picture: bytes in sectors, by layer or by model, and by what they are moved for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from float8_compile.figure import new_figure
from float8_compile.preview.result import Preview
from float8_compile.preview.roles import role

# Forward and backward of each role in two shades; Okabe and Ito's hues, which colour-blind readers can tell apart.
COLOURS = {
    ("forward", "cast"): "#D55E00", ("forward", "other"): "#555555",
    ("forward", "GEMM"): "#0072B2", ("forward", "attention"): "#009E73",
    ("backward", "cast"): "#F0A878", ("backward", "other"): "#BBBBBB",
    ("backward", "GEMM"): "#7FBDE0", ("backward", "attention"): "#84D1B9",
}  # fmt: skip
WORDS = {
    "cast": "casts, with what they are fused with",
    "other": "other kernels",
    "GEMM": "GEMMs",
    "attention": "attention",
}
Part = tuple[str, str]
MOST_BARS = 40


def plot(preview: Preview, path: str | Path) -> None:
    """A bar for each layer, forward and backward. A launch that serves several layers is shared equally among them;
    layers that differ only in numbers are summed where there are more than 40 bars.

    The format follows the path's suffix. Raises ModuleNotFoundError that says what to install where matplotlib is
    missing.
    """
    bars = by_layer(preview)
    if len(bars) > MOST_BARS:
        bars = _without_numbers(bars)
    total = preview.total().sectors / 1e9
    _draw(path, bars, f"{preview.target}: {total:.2f} GB in sectors, by layer (bytes, not time)")


def plot_comparison(previews: Sequence[tuple[str, Preview]], path: str | Path, title: str) -> None:
    """A bar for each of the named previews: Triton kernels alone, since the GEMMs hardly differ."""
    bars: dict[str, dict[Part, float]] = {}
    for name, preview in previews:
        bar = bars.setdefault(name, {})
        for graph in preview.graphs:
            for launch in graph.launches:
                if launch.kind == "triton":
                    part = (_side(graph.phase), role(launch))
                    bar[part] = bar.get(part, 0.0) + launch.sectors
    _draw(path, bars, title)


def by_layer(preview: Preview) -> dict[str, dict[Part, float]]:
    """{layer: {(forward or backward, role): bytes in sectors}}, the layers in the order in which they first run."""
    bars: dict[str, dict[Part, float]] = {}
    for graph in preview.graphs:
        for launch in graph.launches:
            layers = launch.layers or ("",)
            for layer in layers:
                bar, part = bars.setdefault(layer or "(the model)", {}), (_side(graph.phase), role(launch))
                bar[part] = bar.get(part, 0.0) + launch.sectors / len(layers)
    return bars


def _side(phase: str) -> str:
    return "backward" if phase == "backward" else "forward"


def _without_numbers(bars: Mapping[str, Mapping[Part, float]]) -> dict[str, dict[Part, float]]:
    """ "layers.3.mlp" and "layers.4.mlp" as "layers.*.mlp"."""
    summed: dict[str, dict[Part, float]] = {}
    for layer, bar in bars.items():
        into = summed.setdefault(re.sub(r"\b\d+\b", "*", layer), {})
        for part, nbytes in bar.items():
            into[part] = into.get(part, 0.0) + nbytes
    return summed


def _draw(path: str | Path, bars: Mapping[str, Mapping[Part, float]], title: str) -> None:
    figure = new_figure(10, 2.2 + 0.3 * len(bars))
    axes = figure.subplots()
    names, left = list(bars), [0.0] * len(bars)
    for part, colour in COLOURS.items():
        widths = [bars[name].get(part, 0.0) / 1e9 for name in names]
        if any(widths):
            axes.barh(names, widths, left=left, color=colour, label=f"{part[0]}: {WORDS[part[1]]}")
            left = [before + width for before, width in zip(left, widths, strict=True)]
    for position, end in enumerate(left):
        axes.text(end, position, f" {end:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(left, default=0.0) or 1.0)
    axes.set_xlabel("GB in sectors")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if any(left):
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
