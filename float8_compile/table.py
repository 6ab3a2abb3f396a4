"""A table as plain text: the form in which reports print, since the package itself needs no rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns wide enough for their cells, numbers to the right, a rule under the header."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("%", "").lstrip("+-").isdigit()


def readable_number(number: float) -> str:
    """Three significant digits: "0.0123", "448", "1.5e+38"."""
    return f"{number:.3g}"


def readable_share(share: float) -> str:
    """Of 1, in percent: "0", "<0.01 %", "12.3 %"."""
    return "0" if share == 0 else "<0.01 %" if share < 1e-4 else f"{100 * share:.3g} %"
