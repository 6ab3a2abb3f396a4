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
from torch._dynamo.testing import CompileCounterWithBackend

from byte_lm import data
from byte_lm.__main__ import main
from byte_lm.arguments import parse
from byte_lm.model import ByteLM
from byte_lm.optimizers import build_optimizer, set_learning_rate
from byte_lm.settings import BASELINE, OPTIMIZERS, Settings
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
        (["--optimizer", "sgd"], "--optimizer"),
        (["--data", "no/such/path"], "no/such/path: No such file"),
        (["--resume", "no/such/run"], "no checkpoint in no/such/run"),
        (["--resume", "no/such/run", "--steps", "3"], "leave out --steps"),
        (["--resume", "no/such/run", "--no-compile"], "leave out --no-compile"),
        (["--resume", "no/such/run", "--optimizer", "adamw8"], "leave out --optimizer"),
        (["--epochs", "3"], "unrecognized arguments: --epochs"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("scripts/train: ")
    assert error.count("\n") == 1
    assert message in error


def test_adamw8_without_torchao_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    assert main(["--optimizer", "adamw8"]) == 2
    assert capsys.readouterr().err == "scripts/train: --optimizer adamw8 needs torchao: pip install torchao\n"


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


def test_results_name_the_optimizer_and_the_size_of_its_states(text: Path, tmp_path: Path) -> None:
    sizes = {}
    for optimizer in ("adamw", "adamw8"):
        out = tmp_path / optimizer
        assert main(short_run(text, out, "--steps", "1", "--recipe", "bf16", "--optimizer", optimizer)) == 0
        content = json.loads((out / "results.json").read_text())
        assert content["settings"]["optimizer"] == optimizer
        sizes[optimizer] = content["recipes"][0]["optimizer_bytes"]
        first_line = (out / "table.txt").read_text().splitlines()[0]
        assert f"{optimizer} ({sizes[optimizer] / 1e6:.1f} MB of states)" in first_line
    parameters = list(ByteLM(64, 2, 2, 64).parameters())
    assert sizes["adamw"] == sum(8 * p.numel() + 4 for p in parameters)
    assert sizes["adamw8"] == sum((2 + 8 / 256 if p.dim() == 2 else 8) * p.numel() + 4 for p in parameters)


def test_a_run_from_before_there_was_a_choice_of_optimizer_can_be_resumed(text: Path, tmp_path: Path) -> None:
    assert main(short_run(text, tmp_path / "run", "--steps", "1", "--recipe", "bf16")) == 0
    results = tmp_path / "run" / "results.json"
    content = json.loads(results.read_text())
    del content["settings"]["optimizer"]
    results.write_text(json.dumps(content))
    assert parse(["--resume", str(tmp_path / "run")]).settings.optimizer == "adamw"


def weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return state


def in_a_process_of_its_own(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "byte_lm", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(
    optimizer: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ["--steps", "6", "--recipe", "tensorwise", "--optimizer", optimizer]
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

    # In a process that knows of the optimizer only from the run's settings.
    process = in_a_process_of_its_own("--resume", str(broken))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    for recipe in ("bf16", "tensorwise"):
        expected, got = (weights(run / f"{recipe}.pt") for run in (whole, broken))
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    (text / "new.txt").write_text("other bytes than the run began with\n")
    assert main(["--resume", str(broken)]) == 2


def test_ctrl_c_keeps_what_was_done(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = in_a_process_of_its_own(*short_run(text, out, "--steps", "1000"))
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_learning_rate_reaches_the_optimizer(optimizer: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.ones(64, 64)
    stepping = build_optimizer(optimizer, [parameter], compile=False)
    for rate in (0.0, 1e-3, 1e-1):
        set_learning_rate(stepping, rate)
        before = parameter.detach().clone()
        stepping.step()
        # Adam's first steps along one gradient are of the rate's size, and so is the decay.
        torch.testing.assert_close(parameter.detach(), before - rate - 0.1 * rate * before, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("afresh")
# Dynamo asks an input that is no leaf for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_compiles_after_the_first_pass(optimizer: str, text: Path) -> None:
    """Neither the first step, nor another learning rate: `compile_seconds` is all of it, and steps are only steps."""
    compilations = CompileCounterWithBackend("aot_eager")
    settings = Settings(
        recipes=(BASELINE,), size="tiny", steps=4, batch=2, seed=0, data=None, compile=True, optimizer=optimizer
    )
    with torch.compiler.set_stance(force_backend=compilations):
        trainer = Trainer(settings, BASELINE, data.load_text(str(text), settings.shape.context))
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.first_pass()
        assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())
        first = compilations.frame_count
        for _ in range(4):
            trainer.step()
    assert compilations.frame_count == first > 0
