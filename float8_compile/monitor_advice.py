"""What stands out among a monitored model's casts, and what to convert it with instead.

A cast is called good where its SQNR is enough and few numbers are flushed to zero. Another recipe is only named where
its cast of the very same numbers was measured and is good; where none is, the layer is better off in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from float8_compile.operand_statistics import OperandStatistics, Quality
from float8_compile.recipe import Recipe
from float8_compile.table import readable_number, readable_share

# Noise of a hundredth of the energy. Rounding alone gives e4m3 about 31 dB and e5m2 about 25 dB, so what is below this
# loses to its scale, which another scale may mend.
ENOUGH_DB = 20.0
# Half the noise: less is not worth another recipe.
BETTER_DB = 3.0
# Of a dynamic scale nothing saturates. Delayed ones lag behind by design; one number in a thousand, and always the
# largest, is no longer that.
SATURATED_MUCH = 1e-3
# Of normally distributed numbers e4m3 flushes one in 100,000. Flushing small ones hardly shows in SQNR, but where a
# tenth is gone, whole features may be.
FLUSHED_MUCH = 0.1

# The first is the least change.
_REMEDIES = ('"tensorwise"', '"rowwise"', '"rowwise_with_gw_hp"', "None")


@dataclass(frozen=True)
class _Finding:
    """remedy: one of `_REMEDIES`, or "" where no recipe helps. sqnr: what it is about, the lowest comes first."""

    layer: str
    text: str
    remedy: str
    sqnr: float | None


def advise(rows: Iterable[OperandStatistics], recipes: Mapping[str, Recipe]) -> list[str]:
    """Sentences, the worst first, each with layer, operand, numbers and remedy; then the `config=` that does all of it.

    recipes: of each layer, the one that it has. Empty where nothing stands out.
    """
    findings = sorted((finding for row in rows for finding in _findings(row)), key=_order)
    remedies: dict[str, str] = {}
    for found in findings:
        if found.remedy:
            remedies[found.layer] = max(found.remedy, remedies.get(found.layer, found.remedy), key=_REMEDIES.index)
    texts = [found.text for found in findings]
    return [*texts, _conversion(remedies, recipes)] if remedies else texts


def _order(found: _Finding) -> float:
    return math.inf if found.sqnr is None else found.sqnr


def _findings(row: OperandStatistics) -> Iterable[_Finding]:
    where = f"{row.layer or '(root)'}, {row.operand}"
    if row.nonfinite > 0:
        text = (
            f"{where}: {readable_share(row.nonfinite)} of its numbers reached the GEMM as infinite or NaN, which no "
            "cast mends: look for where they come from (loss scale, learning rate, initialisation)"
        )
        yield _Finding(row.layer, text, "", -math.inf)
    if row.saturated > SATURATED_MUCH:
        yield _saturated(row, where)
    elif not _good(Quality(row.sqnr, row.flushed)):
        yield _not_good(row, where)


def _saturated(row: OperandStatistics, where: str) -> _Finding:
    text = f"{where}: {readable_share(row.saturated)} of its numbers saturated at an SQNR of {_db(row.sqnr)}"
    if row.operand.startswith("weight"):
        text += ": the weight was changed by something else than its optimizer: f8.update_delayed_scaling(model)"
        return _Finding(row.layer, text, "", row.sqnr)
    text += (
        ", since its scale lags behind: give the recipe headroom with delayed=f8.DelayedScaling(margin=1), a longer "
        "history, or take dynamic scales"
    )
    return _Finding(row.layer, text, _REMEDIES[0], row.sqnr)


def _not_good(row: OperandStatistics, where: str) -> _Finding:
    text = f"{where}: {_figures(Quality(row.sqnr, row.flushed))}"
    better = {gemm: _good(rowwise) and _is_better(rowwise, row) for gemm, rowwise in row.rowwise.items()}
    if row.cast.granularity == "tensor":
        measured = " and ".join(f"{_figures(rowwise)} for {gemm}" for gemm, rowwise in row.rowwise.items())
        text += f"; a scale per row would give {measured}"
    if all(better.values()):
        remedy = '"rowwise"'
    elif "grad_weight" in better and all(is_better for gemm, is_better in better.items() if gemm != "grad_weight"):
        remedy = '"rowwise_with_gw_hp"'
    else:
        remedy = "None"
    text += ": leave the layer in high precision" if remedy == "None" else f": convert the layer with {remedy}"
    return _Finding(row.layer, text, remedy, row.sqnr)


def _good(quality: Quality) -> bool:
    return (quality.sqnr is None or quality.sqnr >= ENOUGH_DB) and quality.flushed <= FLUSHED_MUCH


def _is_better(rowwise: Quality, row: OperandStatistics) -> bool:
    gain = 0.0 if rowwise.sqnr is None or row.sqnr is None else rowwise.sqnr - row.sqnr
    return gain >= BETTER_DB or row.flushed > FLUSHED_MUCH >= rowwise.flushed


def _figures(quality: Quality) -> str:
    return f"SQNR {_db(quality.sqnr)}, {readable_share(quality.flushed)} flushed to zero"


def _db(sqnr: float | None) -> str:
    return "-" if sqnr is None else f"{readable_number(sqnr)} dB"


def _conversion(remedies: Mapping[str, str], recipes: Mapping[str, Recipe]) -> str:
    """What to paste: the model's recipes with these changes, in the model's order."""
    names = {layer: f'"{recipe.name}"' for layer, recipe in recipes.items()}
    usual = max(names.values(), key=list(names.values()).count)
    wanted = {layer: remedies.get(layer, name) for layer, name in names.items()}
    listed = ", ".join(f'"{layer}": {name}' for layer, name in wanted.items() if name != usual)
    text = (
        f"all of it: f8.convert_to_float8_training(model, config=lambda linear, fqn: {{{listed}}}.get(fqn, {usual})), "
        "with the module_filter_fn that you have"
    )
    custom = '"custom"' in (usual, *wanted.values())
    return f'{text}; for "custom" put your own Recipe' if custom else text
