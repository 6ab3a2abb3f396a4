"""Curves of several seeds: their mean and range, and those of their differences to bf16's curve of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from byte_lm.results import percent_above
from byte_lm.settings import BASELINE

Curve = list[tuple[int, float]]  # steps done, and a loss in nats a byte, or a difference in percent
Runs = dict[str, dict[int, dict[str, Any]]]  # by recipe and seed


def differences(runs: Runs, recipe: str) -> dict[int, Curve]:
    """By seed: how much higher than bf16's of the same seed the held-out loss is, in percent."""
    found = {}
    for seed, run in runs.get(recipe, {}).items():
        yardstick = dict(runs.get(BASELINE, {}).get(seed, {"validation": []})["validation"])
        points = [(step, percent_above(loss, yardstick.get(step))) for step, loss in run["validation"]]
        found[seed] = [(step, percent) for step, percent in points if percent is not None]
    return {seed: curve for seed, curve in found.items() if curve}


def over_seeds(curves: Sequence[Curve]) -> list[dict[str, float]]:
    """Mean, least and most at each step."""
    return [
        {"step": at[0][0], "mean": fmean(of := [value for _, value in at]), "min": min(of), "max": max(of)}
        for at in zip(*curves, strict=True)
    ]


def summary(runs: Runs, recipe: str) -> dict[str, list[dict[str, float]]]:
    """Of one recipe, over all its seeds, for JSON and for the picture."""
    losses = [run["validation"] for run in runs[recipe].values()]
    return {
        "held-out loss": over_seeds(losses),
        "to bf16, %": over_seeds(list(differences(runs, recipe).values())),
    }
