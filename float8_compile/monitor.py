"""Numerics on demand: what float8 does to each operand of each layer, while somebody looks.

    with f8.monitor(model) as seen:
        loss(model(batch)).backward()
    print(seen)

Inside, each layer has a `LayerStatistics`, to which its casts add in the graph; outside it has None, and nothing of
this is in any graph. So the first call inside compiles once more, and afterwards the graphs from before are found
again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from float8_compile.convert import named_linears
from float8_compile.linear import Float8Linear
from float8_compile.monitor_advice import advise
from float8_compile.monitor_picture import plot
from float8_compile.operand_statistics import OPERANDS, LayerStatistics, OperandStatistics, statistics_of
from float8_compile.recipe import Recipe
from float8_compile.table import readable_number, readable_share, text_table

_ADVICE_BELOW_A_TABLE = 5


@contextlib.contextmanager
def monitor(module: nn.Module) -> Iterator[Monitor]:
    """Inside, what the model's Float8Linears cast is measured, forward and backward, in training or not. Yields a
    `Monitor`, which can be read inside and afterwards: `print(seen)`, `seen.rows`, `seen.plot(path)`, `seen.advice()`.

    Outputs, gradients and delayed scales are those without, to the bit, eagerly and under "aot_eager". The first call
    inside compiles once more; afterwards the graphs from before run again. Eagerly it takes float64 copies of each
    operand, one operand at a time. What a rank has is measured on that rank. Not measured: operands in high precision
    (also inside `float8_disabled`), those that come to the layer in float8 (gathered by FSDP2, prepared for tensor
    parallelism), DTensors, and calls under torch.func's transforms. What ranks gathered in float8 is compared with
    what was gathered. Set no other recipe inside.

    Raises ValueError where there is no Float8Linear, RuntimeError where one is monitored already.
    """
    layers = {name: linear for name, linear in named_linears(module) if isinstance(linear, Float8Linear)}
    if not layers:
        raise ValueError(f"{type(module).__name__} has no Float8Linear: call convert_to_float8_training(model) first")
    for name, layer in layers.items():
        if layer.statistics is not None:
            raise RuntimeError(
                f"layer {name or '(root)'!r} is monitored already: read the Monitor of the block around this one, "
                "which can be read inside it, or end that block first"
            )
    monitored = {name: _Monitored(layer.recipe, LayerStatistics(layer.weight.device)) for name, layer in layers.items()}
    seen = Monitor(monitored)
    try:
        for name, layer in layers.items():
            layer.statistics = monitored[name].statistics
        yield seen
    finally:
        for layer in layers.values():
            if isinstance(layer, Float8Linear):  # else it was converted back inside
                layer.statistics = None
        seen._end()


@dataclass(frozen=True)
class _Monitored:
    recipe: Recipe
    statistics: LayerStatistics

    def rows(self, name: str) -> Iterator[OperandStatistics]:
        for operand in OPERANDS:
            row = statistics_of(name, operand, self.statistics.vectors[operand], self.recipe)
            if row is not None:
                yield row


class Monitor:
    """What was measured so far, or, after the block, in all of it. `str` gives the table."""

    def __init__(self, layers: dict[str, _Monitored]) -> None:
        self._layers = layers
        self._rows: tuple[OperandStatistics, ...] | None = None

    @property
    def rows(self) -> tuple[OperandStatistics, ...]:
        """One for each layer, in the model's order, and each of its operands that was cast. Waits for the device."""
        if self._rows is not None:
            return self._rows
        return tuple(row for name, monitored in self._layers.items() for row in monitored.rows(name))

    def advice(self) -> list[str]:
        """What stands out, the worst first, each with layer, operand, numbers and remedy; last a `config=` to paste,
        where another recipe or high precision would help. Empty where nothing does."""
        return advise(self.rows, {name: monitored.recipe for name, monitored in self._layers.items()})

    def plot(self, path: str | Path) -> None:
        """Write a picture: SQNR, flushed and saturated shares by layer and operand. The format follows the suffix.

        Raises ValueError where nothing was recorded, ModuleNotFoundError where matplotlib is missing.
        """
        plot(self.rows, path)

    def table(self) -> str:
        """A line for each row, and below it the first of the advice. "row-wise" is the SQNR that a scale per row would
        give, for each GEMM that reads the cast; "exact" that nothing was lost, "-" that there was nothing but zeros, or
        nothing finite."""
        rows = self.rows
        infinite = any(row.nonfinite for row in rows)
        previous = [None, *(row.layer for row in rows)]
        lines = [_HEADER, *(_cells(row, row.layer != before) for row, before in zip(rows, previous, strict=False))]
        header, *lines = _figures_to_the_right([line if infinite else line[:-1] for line in lines])
        return "\n".join([text_table(header, lines), *self._below(rows)])

    def __str__(self) -> str:
        return self.table()

    def _below(self, rows: tuple[OperandStatistics, ...]) -> Iterator[str]:
        silent = [name or "(root)" for name in self._layers if name not in {row.layer for row in rows}]
        if silent:
            named = ", ".join(silent[:_ADVICE_BELOW_A_TABLE]) + (", ..." if len(silent) > _ADVICE_BELOW_A_TABLE else "")
            yield f"nothing was cast in {len(silent)} of {len(self._layers)} layers: {named}"
        if rows:
            advice = self.advice() or ["nothing stands out"]
            hidden = len(advice) - _ADVICE_BELOW_A_TABLE
            if hidden > 0:  # but show the last line, which is what to paste
                advice[_ADVICE_BELOW_A_TABLE - 1 : -1] = [f"and {hidden} more: see advice()"]
            yield from advice

    def _end(self) -> None:
        self._rows = self.rows


_WORDS = ("layer", "operand", "cast")
_HEADER = (*_WORDS, "amax", "scale", "saturated", "flushed", "SQNR, dB", "row-wise, dB", "not finite")


def _cells(row: OperandStatistics, names_layer: bool) -> tuple[str, ...]:
    return (
        (row.layer or "(root)") if names_layer else "",
        row.operand,
        str(row.cast),
        readable_number(row.amax),
        " to ".join(readable_number(scale) for scale in dict.fromkeys(row.scale)),
        readable_share(row.saturated),
        readable_share(row.flushed),
        _decibels(row.sqnr),
        ", ".join(_decibels(quality.sqnr) for quality in row.rowwise.values()),
        readable_share(row.nonfinite),
    )


def _decibels(value: float | None) -> str:
    return "-" if value is None else "exact" if value == math.inf else readable_number(value)


def _figures_to_the_right(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Padded to their column's width: for "-" and "%" among them a table would take them for words."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first = len(_WORDS)
    return [(*line[:first], *map(str.rjust, line[first:], widths[first:])) for line in lines]
