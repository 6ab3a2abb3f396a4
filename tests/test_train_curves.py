"""The benchmark of loss curves, eagerly on a little text, from its command to its files; and its sums, by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import train_curves
from byte_lm.progress import Progress

pytestmark = pytest.mark.xdist_group("train_curves")  # all read one run
RECIPES = ("bf16", "bf16+nudge", "tensorwise", "torchao:tensorwise")
STEPS = 4


def arguments(folder: Path, text: Path, *others: str) -> list[str]:
    fixed = ["--steps", str(STEPS), "--no-compile", "--data", str(text)]
    return [*fixed, "--recipes", *RECIPES[1:], "--out", str(folder), *others]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox\n" * 200)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """What a run has left."""
    folder = tmp_path_factory.mktemp("train_curves")
    with torch.random.fork_rng():
        assert train_curves.main(arguments(folder, text, "--seeds", "2")) == 0
    return folder


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train_curves.json").read_text())  # type: ignore[no-any-return]


def test_it_leaves_a_table_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".md", ".png"]
    found = document(folder)
    assert tuple(found["recipes"]) == RECIPES
    for recipe in found["recipes"].values():
        assert list(recipe["runs"]) == ["0", "1"]
        for run in recipe["runs"].values():
            assert [step for step, _ in run["validation"]] == [step for step, _ in run["training"]] == [1, 2, 3, 4]
        end = recipe["held-out loss"][-1]
        assert end["step"] == STEPS
        assert end["min"] <= end["mean"] <= end["max"]
    assert (folder / "train_curves.png").read_bytes().startswith(b"\x89PNG")
    table = (folder / "train_curves.md").read_text()
    assert table.count("\n| ") == 1 + len(RECIPES) + 1
    assert "to bf16 after 1 steps, %" in table
    assert "to bf16 after 4 steps, %" in table
    assert f"torch {torch.__version__}" in table


def test_runs_of_one_seed_begin_alike_and_those_of_another_don_t(folder: Path) -> None:
    of = {
        name: [run["training"][0][1] for run in r["runs"].values()] for name, r in document(folder)["recipes"].items()
    }
    assert of["bf16"][0] != of["bf16"][1]
    for name in RECIPES[1:]:
        assert of[name] == pytest.approx(of["bf16"], rel=1e-3)
        assert of[name] != of["bf16"], f"{name} is bf16 itself"


def test_resume_does_only_what_is_missing(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    found = document(half)
    del found["recipes"]["tensorwise"]["runs"]["1"], found["recipes"]["torchao:tensorwise"]
    (half / "train_curves.json").write_text(json.dumps(found))
    assert train_curves.main(arguments(half, text, "--seeds", "2", "--resume")) == 0
    assert "run 1 of 3" in capsys.readouterr().out
    losses = [
        {name: [run["validation"] for run in r["runs"].values()] for name, r in document(place)["recipes"].items()}
        for place in (half, folder)
    ]
    assert losses[0] == losses[1], "and comes to the same numbers"


def test_resume_refuses_another_runs_file(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_curves.main(arguments(folder, text, "--steps", "5", "--resume"))
    assert stopped.value.code == 2
    assert "was made with steps 4, and this is 5" in capsys.readouterr().err


def test_what_is_done_survives_an_interruption(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def trained(settings: Any, recipe: str, *_: Any) -> Progress:
        done.append(recipe)
        if len(done) == 3:
            raise KeyboardInterrupt
        return Progress(recipe, 2, [2.0, 1.0], [0.1, 0.1], [(1, 2.0), (2, 1.0)])

    monkeypatch.setattr(train_curves, "trained", trained)
    assert train_curves.main(arguments(tmp_path, text, "--seeds", "1")) == 130
    assert list(document(tmp_path)["recipes"]) == list(RECIPES[:2])
    assert "go on with the same command and --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--recipes", "delaid"], "unknown recipe 'delaid'"),
        (["--recipes", "delayed+keep"], "changes no loss"),
        (["--seeds", "0"], "0 is less than 1"),
        (["--size", "huge"], "--size"),
        (["--data", "no/such/path"], "No such file"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_curves.main([*given, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_differences_are_to_the_same_seed_and_their_range_is_over_seeds() -> None:
    def runs(*ends: float) -> dict[int, dict[str, Any]]:
        return {seed: {"validation": [(1, 2.0), (2, end)]} for seed, end in enumerate(ends)}

    of = {"bf16": runs(1.0, 2.0, 4.0), "delayed": runs(1.01, 2.0, 3.96)}
    found = train_curves.summary(of, "delayed")
    at_the_end = found["to bf16, %"][-1]
    assert {key: round(number, 6) for key, number in at_the_end.items()} == {"step": 2, "mean": 0, "min": -1, "max": 1}
    assert found["held-out loss"][-1]["max"] == 3.96
    assert train_curves.figures(of, "delayed", 2)["to bf16 after 2 steps, %"] == "+0.00 (-1.00..+1.00)"


def test_a_nudge_is_a_thousandth() -> None:
    assert train_curves.SIZE_OF_NUDGE == 1e-3
    assert (
        train_curves.CurveSettings(
            recipes=("bf16",), size="tiny", steps=2000, batch=8, seed=0, data=None, compile=False
        ).validation_every
        == 2000 // train_curves.POINTS
    )
