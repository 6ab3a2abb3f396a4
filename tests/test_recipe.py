"""The presets are DESIGN.md's table; whatever no GEMM can do is refused when it is built."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from float8_compile import Cast, DelayedScaling, Gemm, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_FNUZ, E5M2_FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
HIGH = Cast(dtype=None)
TENSOR, GRADIENT = Cast(E4M3, "dynamic", "tensor", False), Cast(E5M2, "dynamic", "tensor", False)
ROW, TENSOR_2N = Cast(E4M3, "dynamic", "row", True), Cast(E4M3, "dynamic", "tensor", True)
DELAYED, DELAYED_GRADIENT = Cast(E4M3, "delayed", "tensor", False), Cast(E5M2, "delayed", "tensor", False)
DELAYED_2N = replace(DELAYED, power_of_two=True)

# recipe: (left, right, fast_accum) of output = x @ w.T, grad_input = g @ w, grad_weight = g.T @ x
PRESETS = {
    "tensorwise": ((TENSOR, TENSOR, True), (GRADIENT, TENSOR, False), (GRADIENT, TENSOR, False)),
    "rowwise": ((ROW, ROW, True), (ROW, ROW, False), (ROW, ROW, False)),
    "rowwise_with_gw_hp": ((ROW, ROW, True), (ROW, TENSOR_2N, False), (HIGH, HIGH, False)),
    "delayed": ((DELAYED, DELAYED, True), (DELAYED_GRADIENT, DELAYED, False), (DELAYED_GRADIENT, DELAYED, False)),
}
every_preset = pytest.mark.parametrize("name", PRESETS)


@every_preset
def test_a_preset_is_its_row_of_the_table(name: str) -> None:
    recipe = Recipe.from_name(name)
    gemms = (recipe.output, recipe.grad_input, recipe.grad_weight)
    assert tuple((gemm.left, gemm.right, gemm.fast_accum) for gemm in gemms) == PRESETS[name]
    assert (recipe.name, recipe.emulate) == (name, False)
    assert recipe.delayed == DelayedScaling(history=16, margin=0, amax="max", group=None)


def test_the_table_has_every_preset() -> None:
    assert set(Recipe.names()) == set(PRESETS)


@every_preset
@given(data=st.data())
def test_a_name_is_known_in_any_case(name: str, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    spelled = "".join(letter.upper() if up else letter for letter, up in zip(name, upper, strict=True))
    assert Recipe.from_name(spelled) == Recipe.from_name(name)


@given(st.text())
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    assume(name.lower() not in PRESETS)
    with pytest.raises(ValueError, match="the recipes are tensorwise, rowwise, rowwise_with_gw_hp"):
        Recipe.from_name(name)


def test_an_unknown_name_is_quoted() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'tensorwize'"):
        Recipe.from_name("tensorwize")


@pytest.mark.parametrize(
    ("thing", "field"),
    [
        (TENSOR, "dtype"),
        (Gemm(), "fast_accum"),
        (DelayedScaling(), "history"),
        (Recipe.from_name("rowwise"), "emulate"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_nothing_edits_a_recipe_after_its_birth(thing: Any, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(thing, field, None)


@every_preset
def test_a_recipe_is_a_value(name: str) -> None:
    """Equal, hashed and pickled by what it says, so that two layers can share one and a graph can hold it."""
    first, second = Recipe.from_name(name), Recipe.from_name(name)
    assert first == second == pickle.loads(pickle.dumps(first))
    assert len({first, second}) == 1
    assert len({Recipe.from_name(other) for other in PRESETS}) == len(PRESETS)


def test_a_variant_is_a_replacement() -> None:
    preset = Recipe.from_name("tensorwise")
    variant = replace(preset, grad_weight=Gemm(HIGH, HIGH), emulate=True, name="mine")
    assert variant.output == preset.output
    assert (variant.grad_weight.is_float8, variant.emulate, variant.name) == (False, True, "mine")
    assert preset == Recipe.from_name("tensorwise")


@pytest.mark.parametrize("change", [{"history": 4}, {"margin": 1}, {"amax": "most_recent"}], ids=str)
def test_other_delayed_scaling_makes_another_recipe(change: dict[str, Any]) -> None:
    preset = Recipe.from_name("delayed")
    variant = replace(preset, delayed=replace(preset.delayed, **change))
    assert variant != preset
    assert len({variant, preset, replace(preset, delayed=DelayedScaling(**change))}) == 2
    assert copy.deepcopy(variant) == pickle.loads(pickle.dumps(variant)) == variant


def test_a_process_group_is_kept_as_it_is_when_its_recipe_is_copied() -> None:
    """With the model: a process group can't be copied, and the copy belongs to the same ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recipe = replace(Recipe.from_name("delayed"), delayed=DelayedScaling(group=dist.group.WORLD))
        with pytest.raises(TypeError, match="pickle"):
            copy.deepcopy(dist.group.WORLD)
        assert copy.deepcopy(recipe).delayed.group is dist.group.WORLD
        assert copy.deepcopy(recipe) == recipe != Recipe.from_name("delayed")
    finally:
        dist.destroy_process_group()


DELAYS: list[tuple[Any, tuple[Cast | None, ...]]] = [  # the recipe, its delayed casts of input, weight, grad_output
    (Recipe.from_name("tensorwise"), (None, None, None)),
    (Recipe.from_name("delayed"), (DELAYED, DELAYED, DELAYED_GRADIENT)),
    (Recipe(Gemm(DELAYED, TENSOR), Gemm(TENSOR, TENSOR), Gemm(TENSOR, TENSOR)), (DELAYED, None, None)),
    (Recipe(Gemm(TENSOR, TENSOR), Gemm(TENSOR, TENSOR), Gemm(TENSOR, DELAYED)), (DELAYED, None, None)),
    (Recipe(Gemm(TENSOR, DELAYED), Gemm(TENSOR, ROW), Gemm(HIGH, HIGH)), (None, DELAYED, None)),
    (Recipe(Gemm(TENSOR, ROW), Gemm(TENSOR, DELAYED_2N), Gemm(HIGH, HIGH)), (None, DELAYED_2N, None)),
    (Recipe(Gemm(HIGH, HIGH), Gemm(ROW, TENSOR), Gemm(DELAYED_GRADIENT, TENSOR)), (None, None, DELAYED_GRADIENT)),
]


@pytest.mark.parametrize(("recipe", "casts"), DELAYS, ids=str)
def test_any_operand_of_any_gemm_may_be_delayed(recipe: Recipe, casts: tuple[Cast | None, ...]) -> None:
    assert tuple(map(recipe.delayed_cast, ("input", "weight", "grad_output"))) == casts


def test_what_is_in_high_precision_has_no_scale_to_delay() -> None:
    cast = Cast(None, "delayed", "row")
    assert (cast.is_delayed, str(cast)) == (False, "high precision")


BY_DELAYED = Recipe.from_name("delayed")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Cast(torch.float16), ValueError, r"Cast\(dtype=torch.float16\): expected a float8 dtype such as"),
        (lambda: Cast("e4m3"), ValueError, r"Cast\(dtype=e4m3\): expected a float8 dtype .*or None for high precision"),
        (lambda: Cast(torch.float8_e8m0fnu), ValueError, r"Cast\(dtype=torch.float8_e8m0fnu\): expected a float8"),
        (lambda: Cast(scaling="static"), ValueError, r"Cast\(scaling='static'\): expected one of \('dynamic'"),
        (lambda: Cast(granularity="axis"), ValueError, r"Cast\(granularity='axis'\): .* of \('tensor', 'row'"),
        (lambda: replace(ROW, granularity="col"), ValueError, r"Cast\(granularity='col'\)"),
        (lambda: replace(ROW, scaling="delayed"), ValueError, "other ones each step.*use granularity='tensor', or"),
        (lambda: Gemm(TENSOR, HIGH), ValueError, r"e4m3 tensor · high precision\): both .*or None to both"),
        (lambda: Gemm(HIGH, GRADIENT), ValueError, r"high precision · e5m2 tensor\): both operands are float8 or both"),
        (lambda: Gemm(GRADIENT, GRADIENT), ValueError, r"no GPU multiplies it; use e4m3 for one operand"),
        (lambda: Gemm(Cast(E5M2_FNUZ), Cast(E5M2_FNUZ)), ValueError, "no GPU multiplies it"),
        (lambda: Gemm("e4m3", "e4m3"), TypeError, r"Gemm\(left='e4m3'\): expected a Cast"),
        (lambda: Recipe(TENSOR, TENSOR, TENSOR), TypeError, r"Recipe\(output=.*\): expected a Gemm"),
        (lambda: replace(BY_DELAYED, delayed=16), TypeError, r"Recipe\(delayed=16\): expected a DelayedScaling"),
        (
            lambda: replace(BY_DELAYED, grad_weight=Gemm(DELAYED_GRADIENT, DELAYED_2N)),
            ValueError,
            r"the input is cast as e4m3 delayed and as e4m3 delayed 2\^n, but has one delayed scale: make the two",
        ),
        (
            lambda: replace(BY_DELAYED, grad_input=Gemm(DELAYED_GRADIENT, DELAYED_2N)),
            ValueError,
            r"the weight is cast as e4m3 delayed and as e4m3 delayed 2\^n",
        ),
        (
            lambda: replace(BY_DELAYED, grad_input=Gemm(DELAYED, DELAYED)),
            ValueError,
            "the grad_output is cast as e4m3 delayed and as e5m2 delayed",
        ),
        (
            lambda: replace(Recipe.from_name("tensorwise"), delayed=DelayedScaling(4)),
            ValueError,
            r"Recipe\(delayed=DelayedScaling\(history=4.*\): no cast of it has scaling='delayed'",
        ),
        (lambda: DelayedScaling(history=0), ValueError, r"DelayedScaling\(history=0\): expected 1 or more"),
        (lambda: DelayedScaling(history=-1), ValueError, r"DelayedScaling\(history=-1\): expected 1 or more"),
        (lambda: DelayedScaling(history=16.0), TypeError, r"DelayedScaling\(history=16.0\): expected an int"),
        (lambda: DelayedScaling(history=True), TypeError, r"DelayedScaling\(history=True\): expected an int"),
        (lambda: DelayedScaling(margin=0.5), TypeError, r"DelayedScaling\(margin=0.5\): expected an int"),
        (lambda: DelayedScaling(amax="mean"), ValueError, r"amax='mean'\): expected one of \('max', 'most_recent'\)"),
        (lambda: DelayedScaling(group="all"), TypeError, r"group='all'\): expected a .*ProcessGroup or None for all"),
    ],
)  # fmt: skip
def test_what_no_gemm_can_do_is_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ, None])
def test_every_float8_dtype_and_none_is_understood(dtype: torch.dtype | None) -> None:
    assert Cast(dtype).dtype is dtype


@pytest.mark.parametrize(
    ("name", "casts_once"),  # one cast for both GEMMs of: the input, the weight, the gradient
    [
        ("tensorwise", (True, True, True)),
        ("rowwise", (False, False, False)),  # the other GEMM contracts the other axis
        ("rowwise_with_gw_hp", (False, False, False)),  # and here it wants another granularity or none
        ("delayed", (True, True, True)),
    ],
)
def test_one_cast_serves_both_gemms_where_it_can(name: str, casts_once: tuple[bool, bool, bool]) -> None:
    recipe = Recipe.from_name(name)
    assert (recipe.casts_input_once, recipe.casts_weight_once, recipe.casts_gradient_once) == casts_once


def test_an_operand_in_high_precision_has_no_cast_to_share() -> None:
    recipe = Recipe(Gemm(HIGH, HIGH), Gemm(HIGH, HIGH), Gemm(HIGH, HIGH))
    assert (recipe.casts_input_once, recipe.casts_weight_once, recipe.casts_gradient_once) == (False, False, False)


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (TENSOR, "e4m3 tensor"),
        (GRADIENT, "e5m2 tensor"),
        (ROW, "e4m3 row 2^n"),
        (Cast(E4M3_FNUZ), "e4m3fnuz tensor"),
        (HIGH, "high precision"),
        (DELAYED, "e4m3 delayed"),
        (replace(DELAYED_GRADIENT, power_of_two=True), "e5m2 delayed 2^n"),
        (Gemm(ROW, ROW, fast_accum=True), "e4m3 row 2^n · e4m3 row 2^n, fast accum"),
        (Gemm(GRADIENT, TENSOR), "e5m2 tensor · e4m3 tensor"),
        (Gemm(HIGH, HIGH), "high precision"),
        (Recipe.from_name("rowwise"), "rowwise"),
        (
            Recipe(Gemm(TENSOR, TENSOR), Gemm(GRADIENT, TENSOR), Gemm(HIGH, HIGH)),
            "e4m3 tensor · e4m3 tensor | e5m2 tensor · e4m3 tensor | high precision",
        ),
    ],
    ids=str,
)
def test_it_reads_as_words(thing: object, text: str) -> None:
    assert str(thing) == text
