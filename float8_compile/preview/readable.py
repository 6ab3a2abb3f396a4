"""A preview that a person can read: it prints as a table, draws a picture, gives advice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from float8_compile.preview.advice import Advice, advise
from float8_compile.preview.picture import plot
from float8_compile.preview.result import Preview
from float8_compile.preview.summary import text


@dataclass(frozen=True)
class ReadablePreview(Preview):
    """What `preview` returns. `str` gives tables: totals, launches, what is saved, notes, advice."""

    def __str__(self) -> str:
        return text(self)

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What could be better, drawn from the graphs."""
        return advise(self)

    def plot(self, path: str | Path) -> None:
        """Write a picture of bytes by layer and role; the format follows the suffix. Needs matplotlib."""
        plot(self, path)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"advice": [advice.text for advice in self.advice]}
