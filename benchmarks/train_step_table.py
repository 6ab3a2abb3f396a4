"""The tables and the picture of benchmarks/train_step.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders import counterpart
from benchmarks.interleaved import quantiles
from benchmarks.look import bars, picture
from benchmarks.record import made_by, markdown, write, write_json
from byte_lm.settings import SIZES
from float8_compile.variants import AS_BUILT

STEP, PASSES = "step", "forward + backward"
HUES = {STEP: "#0072B2", PASSES: "#56B4E9"}


def case(part: str, name: str) -> str:
    """One of the things that take turns: a contender's whole step, or its passes alone."""
    return f"{part}: {name}"


@dataclass
class Result:
    """What was measured at one size. samples: seconds by case and round. failed: contenders, and why."""

    size: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        start = case(STEP, "")
        return [key.removeprefix(start) for key in self.samples if key.startswith(start)]

    @property
    def rounds(self) -> int:
        """Those that are complete."""
        return min(map(len, self.samples.values()), default=0)

    def seconds(self, part: str, name: str) -> list[float]:
        """By round."""
        return self.samples[case(part, name)][: self.rounds]

    def times_as_fast(self, part: str, name: str, other: str | None) -> dict[str, float] | None:
        """As another contender, by quantiles of the rounds' ratios; None for itself, or where that wasn't measured."""
        if other == name or other not in self.contenders:
            return None
        rounds = zip(self.seconds(part, other), self.seconds(part, name), strict=True)
        return {key: round(value, 3) for key, value in quantiles([others / own for others, own in rounds]).items()}

    def __str__(self) -> str:
        of = SIZES[self.size]
        return (
            f"{self.size}: {of.layers} layers of width {of.width}, {of.batch * of.context:,} bytes a step; "
            f"{self.rounds} rounds"
        )


def figures(result: Result, part: str, name: str) -> dict[str, Any]:
    """Of one case, as numbers: quantiles in ms, and of speed-ups, or None."""
    return {
        "ms": {key: round(1e3 * value, 3) for key, value in quantiles(result.seconds(part, name)).items()},
        "over bf16": result.times_as_fast(part, name, AS_BUILT),
        "over torchao": result.times_as_fast(part, name, counterpart(name)),
    }


def in_words(figures: Mapping[str, Any]) -> dict[str, str]:
    """The same for people."""

    def speed_up(of: Mapping[str, float] | None) -> str:
        return "-" if of is None else f"{of['median']:.2f} ({of['p25']:.2f}..{of['p75']:.2f})"

    times = figures["ms"]
    return {
        "ms": f"{times['median']:,.1f}",
        "quartiles": f"{times['p25']:,.1f} to {times['p75']:,.1f}",
        **{key: speed_up(figures[key]) for key in ("over bf16", "over torchao")},
    }


def leave(folder: Path, name: str, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    sizes = {
        result.size: {
            "rounds": result.rounds,
            "contenders": {
                name: {part: figures(result, part, name) for part in (STEP, PASSES)} for name in result.contenders
            },
            "failed": result.failed,
        }
        for result in results
    }
    write_json(folder / f"{name}.json", {**about, "sizes": sizes})
    write(folder / f"{name}.md", report(results, about))
    draw(folder / f"{name}.png", results, about)


def report(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Markdown: for each size a table of steps and one of passes; then what failed."""
    lines = [f"{made_by(about)} {about['method']}"]
    for result in results:
        lines.append(f"\n{result}")
        for part in (STEP, PASSES):
            table = [{part: name} | in_words(figures(result, part, name)) for name in result.contenders]
            lines.append(f"\n{markdown(table)}")
        lines += [f"{name} failed: {why}\n" for name, why in result.failed.items()]
    return "\n".join(lines)


def line(result: Result) -> str:
    """What has come out for a size."""
    words = [f"{name} {in_words(figures(result, STEP, name))['ms']}" for name in result.contenders]
    return f"{result.size}, ms a step: {', '.join(words + [f'{name} failed' for name in result.failed])}"


def draw(path: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """Writes a PNG, for each size two pictures: milliseconds, and speed-ups over torchao's of those that have one."""
    heights = [1.1 + 0.42 * len(result.contenders) for result in results]
    title = f"Training steps of scripts/train's model, compiled, on {about['machine']}"
    with picture(path, 11, 1.2 + sum(heights), title) as figure:
        grid = figure.subplots(len(results), 2, squeeze=False, height_ratios=heights)
        for (times, speed), result in zip(grid, results, strict=True):
            against = [name for name in result.contenders if counterpart(name) in result.contenders]
            _bars(times, result, result.contenders, "ms")
            times.set_title(str(result), loc="left", fontsize=10)
            if against:
                _bars(speed, result, against, "over torchao")
                speed.axvline(1, color="black", linewidth=0.8)
            else:
                speed.set_visible(False)
        grid[-1, 0].set_xlabel("ms, median")
        grid[-1, 1].set_xlabel("times as fast as torchao's")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def _bars(axes: Any, result: Result, names: Sequence[str], key: str) -> None:
    """The medians of one of the figures, of both parts."""
    parts = (STEP, PASSES)
    values = {
        part: [of[key] and of[key]["median"] for of in (figures(result, part, n) for n in names)] for part in parts
    }
    bars(axes, names, {part: (HUES[part], of) for part, of in values.items()})
