"""`scripts/train`, eagerly, on the tiny model: what it refuses, leaves behind and continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from byte_lm import data
from byte_lm.__main__ import main
from byte_lm.model import ByteLM
from byte_lm.training import Trainer, learning_rate

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of files, large enough for the tiny model's context on both sides of the split."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"file {number}: the quick brown fox\n" * 20)
    return folder


def short_run(text: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--size", "tiny", "--no-compile", "--batch-size", "2"]
    return [*fixed, "--data", str(text), "--out", str(out), *more]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "rowise"], "unknown recipe 'rowise'"),
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["--steps", "many"], "--steps"),
        (["--size", "huge"], "--size"),
        (["--data", "no/such/path"], "no/such/path: No such file"),
        (["--resume", "no/such/run"], "no checkpoint in no/such/run"),
        (["--resume", "no/such/run", "--steps", "3"], "leave out --steps"),
        (["--resume", "no/such/run", "--no-compile"], "leave out --no-compile"),
        (["--epochs", "3"], "unrecognized arguments: --epochs"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("scripts/train: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("content", [b"", b"too short", b"x" * 70])
def test_too_little_text_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_bytes(content)
    assert main(["--size", "tiny", "--data", str(tmp_path / "short.txt")]) == 2
    assert "too little text" in capsys.readouterr().err


def test_a_run_leaves_table_picture_and_numbers(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(short_run(text, out, "--steps", "3")) == 0
    content = json.loads((out / "results.json").read_text())
    names = [recipe["recipe"] for recipe in content["recipes"]]
    assert names[0] == "bf16"
    assert {"tensorwise", "rowwise", "rowwise_with_gw_hp"} < set(names)
    for recipe in content["recipes"]:
        assert len(recipe["losses"]) == 3
        assert recipe["saved_bytes"] > 0
        assert recipe["validation"][-1] == [3, recipe["validation_loss"]]
    assert (out / "loss.png").read_bytes().startswith(PNG)
    table = (out / "table.txt").read_text()
    assert all(name in table and name in capsys.readouterr().out + table for name in names)
    assert max(map(len, table.splitlines())) <= 80
    assert main(short_run(text, out)) == 2, "a second run must not overwrite the first"


def weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return state


def test_a_resumed_run_ends_with_the_same_bits(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ["--steps", "6", "--recipe", "tensorwise"]
    assert main(short_run(text, whole, *more)) == 0

    step = Trainer.step

    def step_and_interrupt(trainer: Trainer) -> None:
        if trainer.progress.recipe == "tensorwise" and trainer.progress.done == 2:
            signal.raise_signal(signal.SIGINT)
        step(trainer)

    monkeypatch.setattr(Trainer, "step", step_and_interrupt)
    assert main(short_run(text, broken, *more)) == 130
    monkeypatch.undo()
    steps = {r["recipe"]: r["steps_done"] for r in json.loads((broken / "results.json").read_text())["recipes"]}
    assert steps == {"bf16": 6, "tensorwise": 3}
    assert (broken / "loss.png").exists()

    assert main(["--resume", str(broken)]) == 0
    for recipe in ("bf16", "tensorwise"):
        expected, got = (weights(run / f"{recipe}.pt") for run in (whole, broken))
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    (text / "new.txt").write_text("other bytes than the run began with\n")
    assert main(["--resume", str(broken)]) == 2


def test_ctrl_c_keeps_what_was_done(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "byte_lm", *short_run(text, out, "--steps", "1000")]
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "bf16.pt").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--resume {out}" in shown
    (recipe,) = json.loads((out / "results.json").read_text())["recipes"]
    assert 0 < recipe["steps_done"] < 1000
    assert (out / "loss.png").exists()
    assert (out / "table.txt").exists()


def test_text_is_split_by_whole_files_and_always_alike(text: Path) -> None:
    contents = data.read(str(text))
    chosen = data.held_out(list(contents))
    assert 0 < len(chosen) < len(contents)
    assert chosen == data.held_out(list(reversed(list(contents))))
    train, validation = data.split(contents)
    for name, content in contents.items():
        holder, other = (validation, train) if name in chosen else (train, validation)
        assert content in bytes(holder.tolist())
        assert content not in bytes(other.tolist())


def test_the_standard_library_is_enough_for_the_largest_model() -> None:
    text = data.load_text(None, context=1024)
    assert len(text.train) > 20 * len(text.validation) > 1_000_000
    assert data.load_text(None, context=1024).fingerprint == text.fingerprint


def test_batches_are_a_function_of_seed_and_step() -> None:
    text = data.Text("numbers", torch.arange(250, dtype=torch.uint8), torch.arange(99, dtype=torch.uint8))

    def batch(step: int, seed: int) -> torch.Tensor:
        return data.training_batch(text, step, seed, batch=4, context=16)

    assert batch(0, 0).shape == (4, 17)
    assert torch.equal(batch(5, 1), batch(5, 1))
    assert not torch.equal(batch(5, 1), batch(6, 1))
    assert not torch.equal(batch(5, 1), batch(5, 2))
    for rows in data.validation_batches(text, batch=5, context=16):
        assert rows.shape == (5, 17)
        assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)


def test_model_shapes_and_tied_head() -> None:
    model = ByteLM(width=32, layers=2, heads=2, context=16)
    tokens = torch.randint(256, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 256)
    assert logits.dtype == torch.float32
    assert sum(p.shape == (256, 32) for p in model.parameters()) == 1, "the head is the embedding"
    assert all(n % 16 == 0 for p in model.parameters() for n in p.shape)
    changed = tokens.clone()
    changed[:, 8] += 1
    changed %= 256
    difference = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert difference[:8].max() == 0, "attention looks ahead"
    assert difference[8:].min() > 0, "attention does not look back"


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates.index(max(rates)) in (9, 10)
    assert max(rates) == 1.0
    assert rates[0] == pytest.approx(0.1)
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, 1, 1.0) > 0
