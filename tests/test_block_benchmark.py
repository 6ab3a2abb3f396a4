"""The benchmark of transformer blocks from its command to its files, with tiny blocks, whose bytes can be computed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from float8_compile.variants import AS_BUILT

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import block, block_table, llama
from benchmarks.block_process import CHECKPOINTED, MODELS, Job, ProcessError, started, work
from benchmarks.block_table import Result, Row, figures, in_words, report
from benchmarks.deit import SHAPES, Block

BACKEND = "aot_eager_decomp_partition"  # what is kept for backward is chosen as in any graph, without a C++ compiler
CONTENDERS = ("bf16", "tensorwise", "tensorwise+keep")
LINEARS = [module for module in Block(SHAPES["tiny"]).modules() if isinstance(module, nn.Linear)]
WEIGHTS = sum(linear.weight.numel() for linear in LINEARS)

pytestmark = pytest.mark.xdist_group("block")  # all read one run


def arguments(folder: Path, *others: str) -> list[str]:
    return ["--models", "deit-tiny", "--backend", BACKEND, "--rounds", "2", "--out", str(folder), *others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left, without first steps, each of which is a process."""
    folder = tmp_path_factory.mktemp("block")
    assert block.main(arguments(folder, "--compile-rounds", "0", "--contenders", *CONTENDERS)) == 0
    return folder


@pytest.fixture(scope="module")
def contenders(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By contender and side."""
    return json.loads((folder / "block.json").read_text())["models"]["deit-tiny"]  # type: ignore[no-any-return]


def test_it_leaves_tables_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["block.json", "block.md", "block.png"]
    document = json.loads((folder / "block.json").read_text())
    assert document["command"].startswith("python -m benchmarks.block --models deit-tiny --backend aot")
    assert document["versions"]["torch"] == torch.__version__
    assert (document["rounds"], document["compile_rounds"]) == (2, 0)
    assert tuple(document["models"]["deit-tiny"]) == CONTENDERS
    for sides in document["models"]["deit-tiny"].values():
        assert list(sides) == ["as it is", "checkpointed"]
        for of in sides.values():
            assert 0 < of["ms"]["p5"] <= of["ms"]["p25"] <= of["ms"]["median"] <= of["ms"]["p75"] <= of["ms"]["p95"]
            assert (of["cold"], of["warm"], of["failed"]) == (None, None, None)
    assert (folder / "block.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_say_what_the_numbers_are_side_by_side(
    folder: Path, contenders: dict[str, dict[str, dict[str, Any]]]
) -> None:
    text = (folder / "block.md").read_text()
    assert "| over bf16 | over bf16, checkpointed |\n" in text
    assert "first step" not in text, "which were left out"
    for name, sides in contenders.items():
        plain, checkpointed = map(in_words, sides.values())
        for columns in (("ms", "quartiles", "over bf16"), ("after forward, MB", "peak, MB")):
            words = [of[column] for column in columns for of in (plain, checkpointed)]
            assert f"| {name} | {' | '.join(words)} |\n" in text
    assert {of["over bf16"] for of in contenders["bf16"].values()} == {1.0}


def test_a_kept_weight_is_a_byte_an_element(contenders: dict[str, dict[str, dict[str, Any]]]) -> None:
    kept = {name: sides["as it is"]["after forward"] for name, sides in contenders.items()}
    scales = 4 * len(LINEARS)
    assert kept["tensorwise+keep"] - kept["tensorwise"] == WEIGHTS - scales, "to cast it again takes its scale"
    assert kept["tensorwise"] < kept["bf16"]
    for name, sides in contenders.items():
        assert sides["checkpointed"]["after forward"] < kept[name] < sides["as it is"]["peak"]


def test_llama_layers_have_the_shape_they_are_asked_for() -> None:
    layer, (x, cos, sin) = MODELS["llama-tiny"](1)
    assert layer(x, cos, sin).shape == x.shape == (1, 16, 32)
    with torch.device("meta"):
        big, narrow = (MODELS[name](1) for name in ("llama-3-8b", "llama-narrow"))
    assert big[1][0].shape == (1, llama.TOKENS, 4096)
    shapes = [tuple(p.shape) for p in big[0].parameters()]
    assert shapes[:4] == [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    assert sum(p.numel() for p in big[0].parameters()) == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert all(size % 16 == 0 for p in narrow[0].parameters() for size in p.shape)


# First steps and rounds, told by hand


def told_by_hand(log: list[tuple[Job, Path]], stop_at: str = "", fail: str = "") -> Any:
    """A stand-in for `started`: cold takes 8 seconds, warm 2, a step of bf16 2 ms and of all others 1 ms."""

    def started(job: Job, cache: Path) -> Iterator[dict[str, Any]]:
        log.append((job, cache))
        warm = (cache / "kernel").exists()
        (cache / "kernel").touch()
        for case in job.cases:
            if case == fail:
                yield {"case": case, "failed": "OutOfMemoryError: too large"}
            else:
                kept = {"after forward": 1_000_000, "peak": 3_000_000} if job.rounds else {}
                yield {"case": case, "first step": 2.0 if warm else 8.0, **kept}
        for number in range(1, job.rounds + 1):
            seconds = {case: 2e-3 if case.startswith(AS_BUILT) else 1e-3 for case in job.cases}
            yield {"round": number, "seconds": seconds}
            if job.model == stop_at:
                raise KeyboardInterrupt

    return started


def test_a_first_step_is_cold_in_an_empty_cache_and_warm_in_what_that_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[Job, Path]] = []
    monkeypatch.setattr(block, "started", told_by_hand(log))
    monkeypatch.setattr(block_table, "draw", lambda *_: None)  # seventeen times
    others = ["--contenders", "bf16", "delayed", "--compile-rounds", "2"]
    assert block.main(arguments(tmp_path, *others)) == 0
    assert [len(job.cases) for job, _ in log] == 16 * [1] + [4], (
        "two rounds of four cases, each twice; then all at once"
    )
    for cold, warm in zip(log[:16:2], log[1:16:2], strict=True):
        assert cold == warm
    assert len({cache for _, cache in log}) == 8 + 1
    assert all(" " not in cache.name and not cache.exists() for _, cache in log), "g++ wants no blanks"
    orders = [[job.cases[0] for job, _ in log[start : start + 8 : 2]] for start in (0, 8)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(log[-1][0].cases)
    sides = json.loads((tmp_path / "block.json").read_text())["models"]["deit-tiny"]["delayed"]
    for of in sides.values():
        assert (of["colds"], of["warms"], of["cold"], of["warm"]) == ([8.0, 8.0], [2.0, 2.0], 8.0, 2.0)
        assert (of["over bf16"], of["after forward"], of["peak"]) == (2.0, 1_000_000, 3_000_000)
    text = (tmp_path / "block.md").read_text()
    assert "| delayed | 1.00 | 1.00 | 1.00 to 1.00 | 1.00 to 1.00 | 2.00 | 2.00 |\n" in text
    assert "| delayed | 8.0 | 8.0 | 2.0 | 2.0 |\n" in text


def test_what_is_done_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(block, "started", told_by_hand([], stop_at="llama-tiny"))
    others = ["--contenders", "bf16", "delayed", "--models", "deit-tiny", "llama-tiny", "--compile-rounds", "0"]
    assert block.main(arguments(tmp_path, *others)) == 130
    assert capsys.readouterr().err == "stopped\n"
    models = json.loads((tmp_path / "block.json").read_text())["models"]
    assert [of["delayed"]["as it is"]["over bf16"] for of in models.values()] == [2.0, 2.0], "one round of the second"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"], "and nothing unfinished"


def test_a_case_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[tuple[Job, Path]] = []
    monkeypatch.setattr(block, "started", told_by_hand(log, fail="delayed"))
    monkeypatch.setattr(block_table, "draw", lambda *_: None)
    assert block.main(arguments(tmp_path, "--contenders", "bf16", "delayed", "--compile-rounds", "1")) == 0
    assert [job.cases for job, _ in log].count(["delayed"]) == 1, "no warm one"
    assert log[-1][0].cases == ["bf16", "bf16" + CHECKPOINTED, "delayed" + CHECKPOINTED]
    assert "delayed failed: OutOfMemoryError: too large" in (tmp_path / "block.md").read_text()
    assert "deit-tiny, delayed failed: OutOfMemoryError: too large\n" in capsys.readouterr().out


def test_speed_ups_are_over_bf16_on_the_same_side() -> None:
    rows = {name + behind: Row() for name in ("bf16", "delayed") for behind in ("", CHECKPOINTED)}
    result = Result("deit-tiny", rows)
    about = {"command": "", "versions": {}, "machine": "", "method": ""}
    assert "bf16" not in report([result], about), "nothing yet"
    rows["bf16"].seconds, rows["delayed"].seconds = [3.0, 30.0, 4.0], [2.0, 20.0]
    rows["bf16" + CHECKPOINTED].seconds, rows["delayed" + CHECKPOINTED].seconds = [4.0], [4.0]
    over = [figures(result, "delayed" + behind)["over bf16"] for behind in ("", CHECKPOINTED)]
    assert over == [1.5, 1.0]
    assert figures(Result("deit-tiny", {"delayed": rows["delayed"]}), "delayed")["over bf16"] is None


# The process


class Process:
    """A stand-in for a subprocess.Popen."""

    environment: dict[str, str]
    code, lines, last_words = 0, ['{"case": "bf16", "first step": 1.0}\n'], ""

    def __init__(self, command: list[str], *, env: dict[str, str], stderr: Any, **_: Any) -> None:
        assert json.loads(command[-1])["cases"] == ["bf16"]
        type(self).environment = env
        stderr.write(self.last_words)
        self.stdin, self.stdout, self.terminated = io.StringIO(), iter(self.lines), 0

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.terminated == 1
        assert self.stdin.getvalue() == "\n" * len(self.lines), "it waits until a line is read"

    def wait(self) -> int:
        return self.code

    def terminate(self) -> None:
        self.terminated += 1


JOB = Job("deit-tiny", ["bf16"], 1, BACKEND)


def test_a_process_has_the_cache_it_is_given_and_triton_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setattr(subprocess, "Popen", Process)
    before = dict(os.environ)
    assert list(started(JOB, tmp_path)) == [{"case": "bf16", "first step": 1.0}]
    assert Process.environment == {
        **{name: value for name, value in before.items() if name != "TRITON_CACHE_DIR"},
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    assert os.environ == before


def test_a_process_that_comes_to_grief_says_why_and_what_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Grief(Process):
        code, lines, last_words = 1, [], "Traceback\nOutOfMemoryError: too large\n"

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Grief)
        with pytest.raises(ProcessError, match=r"^deit-tiny: OutOfMemoryError: too large$"):
            list(started(JOB, tmp_path))

    def grief(job: Job, cache: Path) -> Iterator[dict[str, Any]]:
        yield {"case": "bf16", "first step": 1.0, "after forward": 10**6, "peak": 2 * 10**6}
        raise ProcessError("deit-tiny: OutOfMemoryError: too large")

    monkeypatch.setattr(block, "started", grief)
    assert block.main(arguments(tmp_path, "--contenders", "bf16", "--compile-rounds", "0")) == 1
    assert capsys.readouterr().err == "deit-tiny: OutOfMemoryError: too large\n"
    assert "| bf16 | 1.00 | - | 2.00 | - |\n" in (tmp_path / "block.md").read_text()


@pytest.mark.usefixtures("afresh")
def test_a_case_that_raises_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(batch: int) -> Any:
        raise MemoryError(f"a batch of {batch}\nand more")

    monkeypatch.setitem(MODELS, "deit-tiny", build)
    told: list[dict[str, Any]] = []
    work(Job("deit-tiny", ["bf16"], 3, BACKEND, rounds=1), told.append)
    assert told == [{"case": "bf16", "failed": "MemoryError: a batch of 3"}]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--contenders", "bf16", "delaid"], "unknown recipe 'delaid'"),
        (["--models", "llama-4"], "invalid choice: 'llama-4'"),
        (["--compile-rounds", "-1"], "-1 is less than 0"),
        (["--batch", "0"], "0 is less than 1"),
    ],
)
def test_what_it_cannot_measure_is_refused_in_a_line(
    others: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        block.main(arguments(tmp_path, *others))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
