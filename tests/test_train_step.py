"""The benchmark of training steps from its command to its files; sums by hand, times only for being there."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from benchmarks import train_step
from benchmarks.train_step_table import PASSES, STEP, Result, case, figures, in_words
from byte_lm.data import Text, load_text
from byte_lm.settings import Settings
from byte_lm.training import Trainer

pytestmark = [
    pytest.mark.xdist_group("train_step"),  # some read one run
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's, hidden else
]
CONTENDERS = ("bf16", "torchao:tensorwise", "delayed")


def arguments(folder: Path, *others: str) -> list[str]:
    fixed = ["--sizes", "tiny", "--backend", "eager", "--rounds", "2", "--data", str(folder / "text.txt")]
    return [*fixed, "--out", str(folder / "out"), *others]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a little text."""
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 200)
    return tmp_path


@pytest.fixture
def text(place: Path) -> Text:
    return load_text(str(place / "text.txt"), 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run has left."""
    folder = tmp_path_factory.mktemp("train_step")
    (folder / "text.txt").write_text("the quick brown fox\n" * 200)
    torch._dynamo.reset()
    with torch.random.fork_rng():
        assert train_step.main(arguments(folder, "--contenders", *CONTENDERS)) == 0
    yield folder / "out"
    torch._dynamo.reset()


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train_step.json").read_text())  # type: ignore[no-any-return]


def test_it_leaves_tables_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["train_step.json", "train_step.md", "train_step.png"]
    found = document(folder)
    assert found["command"].startswith("python -m benchmarks.train_step --sizes tiny --backend eager")
    assert found["versions"]["torch"] == torch.__version__
    assert list(found["sizes"]) == ["tiny"]
    tiny = found["sizes"]["tiny"]
    assert (tiny["rounds"], tiny["failed"], tuple(tiny["contenders"])) == (2, {}, CONTENDERS)
    for name, parts in tiny["contenders"].items():
        for of in parts.values():
            ms = of["ms"]
            assert 0 < ms["p5"] <= ms["p25"] <= ms["median"] <= ms["p75"] <= ms["p95"]
            assert (of["over bf16"] is None) == (name == "bf16")
            assert (of["over torchao"] is None) == (name != "delayed")
    assert (folder / "train_step.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_say_what_the_numbers_are(folder: Path) -> None:
    words = (folder / "train_step.md").read_text()
    assert "\ntiny: 2 layers of width 64, 512 bytes a step; 2 rounds\n" in words
    for name, parts in document(folder)["sizes"]["tiny"]["contenders"].items():
        for of in parts.values():
            assert f"| {name} | {' | '.join(in_words(of).values())} |\n" in words


def test_speed_ups_are_medians_of_the_rounds_ratios_of_complete_rounds() -> None:
    steps = {"bf16": [4.0, 40.0, 4.0], "torchao:rowwise": [3.0, 30.0, 8.0], "rowwise": [2.0, 20.0, 2.0, 1000.0]}
    result = Result("tiny")
    for name, seconds in steps.items():
        result.samples |= {case(STEP, name): seconds, case(PASSES, name): [second / 4 for second in seconds]}
    assert (result.rounds, result.contenders) == (3, list(steps))
    found = figures(result, STEP, "rowwise")
    assert [found[key]["median"] for key in ("ms", "over bf16", "over torchao")] == [2000.0, 2.0, 1.5]
    assert figures(result, PASSES, "rowwise")["ms"]["median"] == 500.0
    assert in_words(found) == {
        "ms": "2,000.0",
        "quartiles": "2,000.0 to 11,000.0",
        "over bf16": "2.00 (2.00..2.00)",
        "over torchao": "1.50 (1.50..2.75)",
    }
    assert figures(result, STEP, "torchao:rowwise")["over torchao"] is None
    assert figures(result, STEP, "bf16")["over bf16"] is None


# Compiled, each by itself


@pytest.mark.usefixtures("afresh")
def test_contenders_share_no_compilations_and_blocks_of_one_do(text: Text) -> None:
    settings = Settings(recipes=("bf16",), size="tiny", steps=9, batch=8, seed=0, data=None, compile=False)
    trainers = [Trainer(settings, name, text) for name in ("bf16", "tensorwise")]
    before = train_step.graphs_compiled()
    with torch._dynamo.config.patch(recompile_limit=1):
        for trainer in trainers:
            train_step.compile_blocks(trainer.model.blocks, "eager")
        for trainer in (*trainers, *trainers):
            trainer.step()
        assert train_step.graphs_compiled() == before + 2
        for trainer in trainers:
            for block in trainer.model.blocks:
                del block.forward
        trainers[0].step()
        with pytest.raises(FailOnRecompileLimitHit):
            trainers[1].step()


def test_a_contender_that_would_run_eagerly_fails(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert train_step.main(arguments(place, "--contenders", "bf16")) == 1
    assert "tiny, bf16 failed: RuntimeError: its blocks were not compiled" in capsys.readouterr().out
    assert not (place / "out").exists()


def test_nothing_is_compiled_while_the_clock_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(train_step, "graphs_compiled", lambda: next(numbers))
    monkeypatch.setattr(train_step, "prepared", lambda *_: {STEP: lambda: None, PASSES: lambda: None})
    with pytest.raises(RuntimeError, match="round 1: a block was compiled anew"):
        train_step.main(arguments(place))
    assert not (place / "out").exists()


# The command


def test_complete_rounds_survive_an_interruption(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, samples: dict[str, list[float]], **__: Any) -> None:
        samples |= {case(STEP, "tensorwise"): [1e-3, 2e-3, 3e-3], case(PASSES, "tensorwise"): [1e-3, 1e-3]}
        raise KeyboardInterrupt

    monkeypatch.setattr(train_step, "prepared", lambda *_: {})
    monkeypatch.setattr(train_step, "interleaved", interrupted)
    assert train_step.main(arguments(place, "--contenders", "tensorwise", "--rounds", "50")) == 130
    tiny = document(place / "out")["sizes"]["tiny"]
    assert (tiny["rounds"], list(tiny["contenders"])) == (2, ["tensorwise"])
    assert "; 2 rounds\n" in (place / "out" / "train_step.md").read_text()
    assert sorted(path.suffix for path in (place / "out").iterdir()) == [".json", ".md", ".png"], "nothing unfinished"
    printed = capsys.readouterr()
    assert printed.err == "stopped\n"
    assert "| tensorwise |" in printed.out


@pytest.mark.usefixtures("afresh")
def test_a_contender_that_fails_is_told_and_the_others_go_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(name: str, *_: Any) -> Any:
        if name == "rowwise":
            raise RuntimeError("Only bf16 results\nand more")
        return {part: lambda: time.sleep(1e-3) for part in (STEP, PASSES)}

    monkeypatch.setattr(train_step, "prepared", prepared)
    assert train_step.main(arguments(place, "--contenders", "rowwise", "bf16")) == 1
    tiny = document(place / "out")["sizes"]["tiny"]
    assert (list(tiny["contenders"]), tiny["failed"]) == (["bf16"], {"rowwise": "RuntimeError: Only bf16 results"})
    assert "\nrowwise failed: RuntimeError: Only bf16 results\n" in (place / "out" / "train_step.md").read_text()
    assert "tiny, rowwise failed: RuntimeError: Only bf16 results\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--contenders", "bf16", "delaid"], "unknown recipe 'delaid'"),
        (["--contenders", "delayed+keep"], "has no weights that are kept or cached"),
        (["--sizes", "huge"], "invalid choice: 'huge'"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--data", "no/such/path"], "No such file"),
    ],
)
def test_what_it_cannot_measure_is_refused_in_a_line(
    others: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_step.main(arguments(place, *others))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (place / "out").exists()
