"""`scripts/train` with two processes: what one process would have come to, and one end for all.

Bounds are relative, of each step's loss and of the held-out one. In bfloat16 only the order of sums is another. In
float8 a tensor's dynamic scale is that of one process's part, so that other bits are rounded away, and a sum's last bit
can decide how the next layer rounds.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Ranks

from byte_lm import data
from byte_lm.__main__ import main
from byte_lm.parallel import ALONE, Team, clip_gradients, whole
from byte_lm.settings import Settings
from byte_lm.training import Trainer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STEPS = 4
BOUNDS = {"bf16": 1e-4, "delayed": 2e-3, "tensorwise": 2e-3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"file {number}: the quick brown fox\n" * 20)
    return folder


def trainer(kind: str | None, recipe: str, text: Path, float8_all_gather: bool = False) -> Trainer:
    settings = Settings(
        recipes=("bf16", recipe),
        size="tiny",
        steps=STEPS,
        batch=4,
        seed=0,
        data=None,
        compile=False,
        parallel=kind,
        float8_all_gather=float8_all_gather,
    )
    return Trainer(settings, recipe, data.load_text(str(text), settings.shape.context), Team(kind) if kind else ALONE)


@functools.cache
def losses(kind: str | None, recipe: str, text: Path, float8_all_gather: bool = False) -> list[float]:
    """Of all steps, and of the held-out text at the end."""
    training = trainer(kind, recipe, text, float8_all_gather)
    training.first_pass()
    for _ in range(STEPS):
        training.step()
    training.validate()
    return [*training.progress.losses, training.progress.validation[-1][1]]


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_two_processes_come_to_the_losses_of_one(kind: str, recipe: str, two: Ranks, text: Path) -> None:
    first, second = two(losses, kind, recipe, text)
    assert first == second
    assert first == pytest.approx(losses(None, recipe, text), rel=BOUNDS[recipe])


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_float8_all_gather_changes_nothing(recipe: str, two: Ranks, text: Path) -> None:
    assert two(losses, "fsdp2", recipe, text, True) == two(losses, "fsdp2", recipe, text)


def clipped_norm(kind: str, text: Path, largest: float) -> float:
    training = trainer(kind, "bf16", text)
    training.loss(training.batch()).backward()
    clip_gradients(training.model.parameters(), largest)
    gradients = [whole(p.grad) for p in training.model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_gradients_are_clipped_by_the_norm_of_all(kind: str, two: Ranks, text: Path) -> None:
    assert two(clipped_norm, kind, text, 0.01) == pytest.approx([0.01] * 2, rel=1e-4)


def resumed_losses(kind: str, recipe: str, text: Path, file: Path) -> list[float]:
    """As `losses`, by two trainers, of which the second continues what the first has saved."""
    first = trainer(kind, recipe, text)
    first.first_pass()
    first.step()
    first.save(file)
    second = trainer(kind, recipe, text)
    second.load(file)
    second.first_pass()
    while not second.progress.complete:
        second.step()
    second.validate()
    return [*second.progress.losses, second.progress.validation[-1][1]]


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_a_resumed_run_ends_with_the_same_bits(kind: str, two: Ranks, text: Path, tmp_path: Path) -> None:
    resumed = two(resumed_losses, kind, "delayed", text, tmp_path / "delayed.pt")
    assert resumed == two(losses, kind, "delayed", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nproc 2", "say how 2 processes share the work: --parallel ddp, fsdp2, tp"),
        ("--parallel tp", "--nproc N, or torchrun"),
        ("--nproc 3 --parallel fsdp2", "8 sequences are not 3 x n; see --batch-size"),
        ("--nproc 3 --parallel tp", "2 are not 3 x n"),
        ("--nproc 2 --parallel tp --optimizer adamw8", "adamw8 goes with ddp only"),
        ("--float8-all-gather", "weights that --parallel fsdp2 gathers"),
        ("--nproc 2 --parallel ddp --float8-all-gather", "weights that --parallel fsdp2 gathers"),
        ("--nproc 2 --parallel fsdp2 --float8-all-gather --recipe bf16", "needs a float8 recipe, and bf16 is none"),
        ("--resume no/such/run --nproc 2", "leave out --nproc"),
    ],
)
def test_bad_arguments_get_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = "--resume" in arguments
    assert main([*([] if resumed else ["--size", "tiny"]), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("scripts/train: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "4", "--parallel", "ddp"], "a run of 4 processes, and torchrun started 2"),
        ([], "say how 2 processes share the work"),
    ],
)
def test_bad_arguments_under_torchrun(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--size", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err


def run(text: Path, out: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    size = ["--size", "tiny", "--batch-size", "4", "--steps", str(STEPS), "--recipe", "bf16", "--no-compile"]
    command = [sys.executable, "-m", "byte_lm", *size, "--nproc", "2", "--parallel", "ddp"]
    command += ["--data", str(text), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, SCRIPTS]))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_nproc_starts_processes_of_which_one_writes(text: Path, tmp_path: Path) -> None:
    done = run(text, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("table, picture and numbers:") == 1
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["settings"]["processes"] == 2
    (recipe,) = content["recipes"]
    found = [*recipe["losses"], recipe["validation_loss"]]
    assert found == pytest.approx(losses(None, "bf16", text), rel=BOUNDS["bf16"])


def test_a_process_that_dies_ends_all_with_its_message(text: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from byte_lm.training import Trainer\n"
        "    def step(trainer): raise RuntimeError('out of luck')\n"
        "    Trainer.step = step\n"
    )
    done = run(text, tmp_path / "run", tmp_path)
    assert done.returncode == 1
    assert "scripts/train: process 1 failed, and ended all: RuntimeError: out of luck\n" in done.stderr
