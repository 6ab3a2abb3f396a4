"""What a monitored model prints, draws and advises: nothing where nothing is wrong, else what to convert it with."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_checks import K, backward, batches, mlp, plain_mlp
from torch import Tensor

import float8_compile as f8
from float8_compile.monitor import Monitor
from float8_compile.monitor_advice import advise
from float8_compile.monitor_picture import MOST_LAYERS, _layers, _short, _shortened, plot
from float8_compile.operand_statistics import OperandStatistics, Quality
from float8_compile.recipe import E4M3, Cast
from float8_compile.table import readable_number, readable_share

PNG = b"\x89PNG"
GOOD, BAD = Quality(31.0, 0.0), Quality(8.0, 0.0)
TENSOR, ROW, DELAYED = Cast(), Cast(granularity="row", power_of_two=True), Cast(E4M3, "delayed")


def row(layer: str = "up", operand: str = "input", **other: Any) -> OperandStatistics:
    """One where nothing is wrong, but for what is given."""
    rowwise = {"weight": ("output", "grad_input"), "grad_output": ("grad_input", "grad_weight")}
    usual: dict[str, Any] = {
        "cast": TENSOR, "calls": 1, "numbers": 100, "amax": 1.0, "scale": (448.0, 448.0), "saturated": 0.0,
        "flushed": 0.0, "nonfinite": 0.0, "sqnr": 31.0,
        "rowwise": dict.fromkeys(rowwise.get(operand, ("output", "grad_weight")), GOOD),
    }  # fmt: skip
    return OperandStatistics(layer, operand, **{**usual, **other})


def advice(*rows: OperandStatistics, recipe: str = "tensorwise") -> list[str]:
    return advise(rows, {row.layer: f8.Recipe.from_name(recipe) for row in rows})


# Advice

BY_GEMM = {"output": GOOD, "grad_weight": BAD}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a scale per row helps": ({"sqnr": 12.0}, '"rowwise"'),
    "it helps one GEMM, and grad_weight not": ({"sqnr": 12.0, "rowwise": BY_GEMM}, '"rowwise_with_gw_hp"'),
    "it helps grad_weight alone": ({"sqnr": 8.0, "rowwise": {"output": BAD, "grad_weight": GOOD}}, "None"),
    "it does not help": ({"sqnr": 8.0, "rowwise": dict.fromkeys(BY_GEMM, BAD)}, "None"),
    "it helps a little": ({"sqnr": 19.0, "rowwise": dict.fromkeys(BY_GEMM, Quality(20.5, 0.0))}, "None"),
    "it helps one GEMM of a weight": (
        {"operand": "weight", "sqnr": 8.0, "rowwise": {"output": GOOD, "grad_input": BAD}},
        "None",
    ),
    "small numbers vanish": ({"flushed": 0.4}, '"rowwise"'),
    "and do so by rows": ({"flushed": 0.4, "rowwise": dict.fromkeys(BY_GEMM, Quality(31.0, 0.3))}, "None"),
    "by rows already": ({"cast": ROW, "sqnr": 8.0, "rowwise": {"output": BAD}}, "None"),
    "by rows already, for grad_weight": (
        {"operand": "input for grad_weight", "cast": ROW, "sqnr": 8.0, "rowwise": {"grad_weight": BAD}},
        '"rowwise_with_gw_hp"',
    ),
    "a scale that lags": ({"cast": DELAYED, "saturated": 0.005, "sqnr": 12.0}, '"tensorwise"'),
}


@pytest.mark.parametrize("case", CASES)
def test_one_finding_names_layer_operand_numbers_and_remedy(case: str) -> None:
    other, remedy = CASES[case]
    bad = row(**other)
    recipe = {ROW: "rowwise", DELAYED: "delayed", TENSOR: "rowwise_with_gw_hp"}[bad.cast]
    if remedy == f'"{recipe}"':
        recipe = "tensorwise"
    text, paste = advice(bad, row("down"), recipe=recipe)
    assert text.startswith(f"up, {bad.operand}: ")
    figure = bad.saturated or (bad.flushed if bad.flushed else None)
    assert (readable_share(figure) if figure else f"{readable_number(bad.sqnr or 0)} dB") in text
    assert f'{{"up": {remedy}}}.get(fqn, "{recipe}")' in paste
    if remedy == "None":
        assert text.endswith("leave the layer in high precision")
    elif remedy != '"tensorwise"':
        assert text.endswith(f"convert the layer with {remedy}")


@pytest.mark.parametrize(
    "fine",
    [{}, {"sqnr": 20.0}, {"sqnr": None}, {"sqnr": math.inf}, {"flushed": 0.1}, {"cast": DELAYED, "saturated": 0.001}],
)
def test_where_nothing_is_wrong_nothing_is_said(fine: dict[str, Any]) -> None:
    assert advice(row(**fine)) == []


def test_what_no_recipe_mends_has_no_conversion() -> None:
    (text,) = advice(row(nonfinite=0.25))
    assert re.match("up, input: 25 % of its numbers reached the GEMM as infinite or NaN", text)
    (text,) = advice(row(operand="weight", cast=DELAYED, saturated=0.01), recipe="delayed")
    assert "f8.update_delayed_scaling(model)" in text


def test_the_worst_comes_first_and_the_strongest_remedy_of_a_layer_wins() -> None:
    high = dict.fromkeys(BY_GEMM, BAD)
    texts = advice(
        row("a", sqnr=15.0), row("b", sqnr=5.0, rowwise=high), row("b", "weight", sqnr=9.0), row("c", nonfinite=0.1),
        row("d"),
    )  # fmt: skip
    assert [text.split(":")[0] for text in texts] == ["c, input", "b, input", "b, weight", "a, input", "all of it"]
    assert '{"a": "rowwise", "b": None}.get(fqn, "tensorwise")' in texts[-1]


def test_layers_with_other_recipes_keep_them() -> None:
    recipes = {name: f8.Recipe.from_name("tensorwise") for name in ("a", "b", "c")}
    recipes["b"] = f8.Recipe.from_name("rowwise")
    *_, paste = advise([row("a", sqnr=12.0), row("b"), row("c")], recipes)
    assert '{"a": "rowwise", "b": "rowwise"}.get(fqn, "tensorwise")' in paste
    recipes["c"] = replace(recipes["c"], name="custom")
    *_, paste = advise([row("a", sqnr=12.0), row("b"), row("c")], recipes)
    assert paste.endswith('for "custom" put your own Recipe')


# Of real models


def run(model: Any, x: Tensor) -> Monitor:
    with f8.monitor(model) as seen:
        backward(model, x)
    return seen


def with_outliers(size: float) -> Tensor:
    """One token is louder, the last."""
    x = batches(1, 16, K)[0]
    x[-1] *= size
    return x


def test_a_healthy_model_gets_no_advice() -> None:
    for recipe in f8.Recipe.names():
        seen = run(mlp(K, 48, 40, config=recipe), with_outliers(1))
        assert seen.advice() == []
        assert str(seen).endswith("\nnothing stands out")


def test_what_it_says_to_paste_can_be_pasted_and_helps() -> None:
    """One token so loud that the others vanish beside it under one scale."""
    x = with_outliers(1e7)
    seen = run(mlp(K, 48, 40, config="tensorwise"), x)
    *texts, paste = seen.advice()
    assert any(text.startswith("0, input: ") for text in texts)
    call = re.fullmatch(r"all of it: (.*), with the module_filter_fn that you have", paste)
    assert call
    model = plain_mlp(K, 48, 40)
    eval(call[1], {"f8": f8, "model": model})
    assert model[0].recipe.name == "rowwise_with_gw_hp"  # type: ignore[union-attr]
    better = run(model, x)
    assert len(better.advice()) < len(seen.advice())
    assert better.rows[0].flushed < 0.01 < 0.9 < seen.rows[0].flushed


# The table


def table(*rows: OperandStatistics) -> str:
    seen = Monitor({})
    seen._rows = rows
    return seen.table()


def test_figures_stand_under_one_another_and_a_layer_is_named_once() -> None:
    rows = (
        row("layers.0.up", amax=123456.0, scale=(0.25, 2.0), flushed=0.0523456, sqnr=31.26),
        row("layers.0.up", "weight", sqnr=math.inf, saturated=1e-6),
        row("", "grad_output", cast=Cast(torch.float8_e5m2), sqnr=None, amax=0.0),
    )
    seen = Monitor({})
    seen._rows = rows
    lines = seen.table().splitlines()
    assert lines[:5] == [
        "layer        operand      cast             amax      scale  saturated  flushed  SQNR, dB  row-wise, dB",
        "-----------  -----------  -----------  --------  ---------  ---------  -------  --------  ------------",
        "layers.0.up  input        e4m3 tensor  1.23e+05  0.25 to 2          0   5.23 %      31.3        31, 31",
        "             weight       e4m3 tensor         1        448    <0.01 %        0     exact        31, 31",
        "(root)       grad_output  e5m2 tensor         0        448          0        0         -        31, 31",
    ]


def test_a_column_for_what_is_not_finite_only_where_there_is_any() -> None:
    assert "not finite" not in str(run(mlp(K, 48), with_outliers(1)))
    text = str(run(mlp(K, 48, config="rowwise"), with_outliers(math.inf)))
    assert re.search(r"not finite\n", text)
    assert re.search(r"0 +input .* 6.25 %\n", text)
    assert "nan" not in text.replace("NaN", "")


def test_below_the_table_stand_the_worst_and_what_to_paste() -> None:
    model = mlp(K, 48, 40, 48, 40, 48, K, config="rowwise")
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight[:, 0] *= 1e6
    seen = run(model, with_outliers(1))
    count = len(seen.advice())
    assert count > 5
    *_, more, paste = str(seen).splitlines()
    assert more == f"and {count - 5} more: see advice()"
    assert paste == seen.advice()[-1]
    assert seen.advice()[3] in str(seen)
    assert seen.advice()[4] not in str(seen)


def test_without_rows_there_is_a_header_and_the_silent_layers() -> None:
    with f8.monitor(mlp(K, 48)) as seen:
        assert str(seen).startswith("layer  operand")
        assert str(seen).endswith("nothing was cast in 1 of 1 layers: 0")


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0"), (1e-9, "<0.01 %"), (1e-4, "0.01 %"), (0.123456, "12.3 %"), (1, "100 %")]
)
def test_a_share_is_readable(share: float, text: str) -> None:
    assert readable_share(share) == text


# The picture


def many(count: int) -> Sequence[OperandStatistics]:
    operands = ("input", "weight", "grad_output", "input for grad_weight")
    return [
        row(f"layers.{number}.a_long_name_for_an_attention_module.projection", operand, sqnr=10 + number % 25)
        for number in range(count)
        for operand in operands
    ]


def test_pictures_are_written(tmp_path: Path) -> None:
    seen = run(mlp(K, 48, 40, config="rowwise"), with_outliers(1))
    seen.plot(tmp_path / "few.png")
    plot(many(100), tmp_path / "many.png")
    plot(many(MOST_LAYERS + 10), tmp_path / "most.svg")
    plot([row("", sqnr=None, flushed=1.0)], str(tmp_path / "one.png"))
    for name in ("few.png", "many.png", "one.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    text = (tmp_path / "most.svg").read_text()
    assert f"the {MOST_LAYERS} of {MOST_LAYERS + 10} layers with the lowest SQNR" in text


def test_of_too_many_layers_the_worst_stand_in_the_models_order() -> None:
    shown = _layers(many(MOST_LAYERS + 10))
    assert len(shown) == MOST_LAYERS
    numbers = [int(name.split(".")[1]) for name in shown]
    assert numbers == sorted(numbers)
    left_out = set(range(MOST_LAYERS + 10)) - set(numbers)
    assert min(number % 25 for number in left_out) >= max(number % 25 for number in numbers) - 1


def test_long_names_keep_their_end() -> None:
    name = "model." + 20 * "inner." + "mlp.up"
    assert _shortened(name).endswith("inner.mlp.up")
    assert len(_shortened(name)) == 48
    assert (_shortened("mlp.up"), _shortened("")) == ("mlp.up", "(root)")


@pytest.mark.parametrize(
    ("value", "text"), [(31.26, "31.3"), (0, "0"), (0.0004, "<.01"), (0.0976, "0.098"), (100, "100.0"), (-3.2, "-3.2")]
)
def test_numbers_in_it_are_short(value: float, text: str) -> None:
    assert _short(value) == text


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with f8.monitor(mlp(K, 48)) as seen:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        seen.plot(tmp_path / "a.png")


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_a_picture_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'float8_compile\[train\]'"):
        plot([row()], tmp_path / "a.png")
