"""A picture that is written to a file: matplotlib's figure, brought when one is drawn."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """A `matplotlib.figure.Figure` of that size in inches. Nothing is shown on a screen, so none is needed.

    Raises ModuleNotFoundError that says what to install where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib, which is not installed: pip install 'float8_compile[train]'", name=error.name
        ) from None
    return Figure(figsize=(width, height), layout="constrained")
