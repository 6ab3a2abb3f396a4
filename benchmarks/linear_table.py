"""The tables and the picture of benchmarks/linear.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.contenders import counterpart
from benchmarks.interleaved import quantiles, ratio
from benchmarks.look import colour, marker, picture
from benchmarks.record import made_by, markdown, write, write_json

BASELINE = "nn.Linear"


@dataclass(frozen=True)
class Row:
    """One contender. seconds: of a call, by round. kernels: None where they can't be counted."""

    seconds: Sequence[float]
    saved: int
    kernels: int | None


Rows = Mapping[str, Row]  # by contender


@dataclass(frozen=True)
class Layer:
    """What was measured of one: K and N are its in_features and out_features. failed: contenders, and why."""

    dtype: str
    shape: str
    K: int
    N: int
    rows: Rows
    failed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dtype}, {self.shape}: {self.K} x {self.N}"


def figures(rows: Rows, name: str) -> dict[str, Any]:
    """Of one contender, as numbers: quantiles in us, speed-ups or None."""
    row = rows[name]
    times = {key: round(1e6 * value, 2) for key, value in quantiles(row.seconds).items()}
    other = counterpart(name)
    return {
        **times,
        "over nn.Linear": _speed_up(rows, name, BASELINE),
        "over torchao": _speed_up(rows, name, other) if other else None,
        "saved": row.saved,
        "kernels": row.kernels,
    }


def _speed_up(rows: Rows, name: str, other: str) -> float | None:
    """How many times as fast; None for a contender itself, or where the other wasn't measured."""
    return round(ratio(rows[other].seconds, rows[name].seconds), 3) if other in rows and other != name else None


def in_words(figures: Mapping[str, Any]) -> dict[str, str]:
    """The same for people."""

    def optional(key: str, form: str) -> str:
        return "-" if figures[key] is None else f"{figures[key]:{form}}"

    return {
        "us": f"{figures['median']:,.0f}",
        "quartiles": f"{figures['p25']:,.0f} to {figures['p75']:,.0f}",
        "over nn.Linear": optional("over nn.Linear", ".2f"),
        "over torchao": optional("over torchao", ".2f"),
        "saved, kB": f"{figures['saved'] / 1e3:,.1f}",
        "kernels": optional("kernels", "d"),
    }


def leave(folder: Path, name: str, layers: Sequence[Layer], about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    document = [
        {key: getattr(layer, key) for key in ("dtype", "shape", "K", "N")}
        | {"contenders": {name: figures(layer.rows, name) for name in layer.rows}, "failed": layer.failed}
        for layer in layers
    ]
    write_json(folder / f"{name}.json", {**about, "layers": document})
    write(folder / f"{name}.md", report(layers, about))
    draw(folder / f"{name}.png", layers, about)


def report(layers: Sequence[Layer], about: Mapping[str, Any]) -> str:
    """Markdown: a table for each layer."""
    lines = [f"{made_by(about)} {about['method']}"]
    for layer in layers:
        table = [{"": name} | in_words(figures(layer.rows, name)) for name in layer.rows]
        lines.append(f"\n{layer}\n\n{markdown(table) if table else ''}")
        lines += [f"{name} failed: {why}\n" for name, why in layer.failed.items()]
    return "\n".join(lines)


def line(layer: Layer) -> str:
    """What has come out for a layer."""
    words = [f"{name} {in_words(figures(layer.rows, name))['us']}" for name in layer.rows]
    failed = [f"{name} failed" for name in layer.failed]
    return f"{layer}, us: {', '.join(words + failed)}"


def draw(path: Path, layers: Sequence[Layer], about: Mapping[str, Any]) -> None:
    """Writes a PNG, a row of two pictures for each dtype: speed-ups over nn.Linear, and saved bytes."""
    by_dtype = [list(of) for _, of in groupby(layers, lambda layer: layer.dtype)]
    heights = [0.8 + 0.55 * len(of) for of in by_dtype]
    title = f"Forward and backward of a layer, {about['tokens']} tokens, on {about['machine']}"
    with picture(path, 12, 2.2 + sum(heights), title) as figure:
        grid = figure.subplots(len(by_dtype), 2, squeeze=False, sharex="col", sharey="row", height_ratios=heights)
        for (speed, saved), of in zip(grid, by_dtype, strict=True):
            for place, layer in enumerate(of):
                for number, name in enumerate(layer.rows):
                    at = place + 0.84 * ((number + 0.5) / len(layer.rows) - 0.5)
                    _points(speed, saved, at, name, layer.rows)
            speed.set_yticks(range(len(of)), [str(layer).replace(": ", "\n") for layer in of])
            speed.set_ylim(len(of) - 0.5, -0.5)
            speed.axvline(1, color="black", linewidth=0.8)
            for axes in (speed, saved):
                axes.grid(axis="x", alpha=0.25, linewidth=0.6)
                for place in range(1, len(of)):
                    axes.axhline(place - 0.5, color="black", alpha=0.15, linewidth=0.6)
        for axes in grid[-1]:
            axes.set_xlim(left=0)
        grid[-1, 0].set_xlabel(f"times as fast as compiled {BASELINE}; lines: quartiles")
        grid[-1, 1].set_xlabel("MB saved between forward and backward")
        legends = [axes.get_legend_handles_labels() for axes in grid[:, 1]]
        entries = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, frameon=False)


def _points(speed: Any, saved: Any, at: float, name: str, rows: Rows) -> None:
    """A contender at one shape, in both pictures."""
    look = {"color": colour(name), "marker": marker(name), "linestyle": "", "markersize": 4}
    saved.plot([rows[name].saved / 1e6], [at], label=name, **look)
    if BASELINE in rows:
        over = quantiles([base / own for base, own in zip(rows[BASELINE].seconds, rows[name].seconds, strict=True)])
        speed.plot([over["p25"], over["p75"]], [at, at], color=colour(name), linewidth=1, alpha=0.6)
        speed.plot([over["median"]], [at], **look)
