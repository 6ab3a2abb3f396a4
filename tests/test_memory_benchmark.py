"""The memory benchmark from its command to its files, with a tiny model, whose bytes can be computed by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import memory
from benchmarks.deit import SHAPES, Deit
from benchmarks.memory import COUNTED, MEASURED, Result, Row

BACKEND = "aot_eager_decomp_partition"  # what is kept for backward is chosen as in any graph, without a C++ compiler
CONTENDERS = ("bf16", "tensorwise", "tensorwise+keep", "tensorwise+cached", "tensorwise+keep+cached+flat")
TINY = SHAPES["tiny"]
BLOCKS = Deit(TINY).blocks
LINEARS = [module for module in BLOCKS.modules() if isinstance(module, nn.Linear)]
WEIGHTS = sum(linear.weight.numel() for linear in LINEARS)  # elements of those that are cast
PARAMETERS = sum(p.numel() for p in Deit(TINY).parameters())
SCALE = 4 * len(LINEARS)  # bytes of a float32 for each weight

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.xdist_group("memory"),  # all read one run
]


def arguments(folder: Path, *others: str) -> list[str]:
    return ["--models", "tiny", "--backend", BACKEND, "--rounds", "1", "--out", str(folder), *others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run has left."""
    folder = tmp_path_factory.mktemp("memory")
    torch._dynamo.reset()
    with torch.random.fork_rng():
        assert memory.main(arguments(folder, "--contenders", *CONTENDERS)) == 0
    yield folder
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """By contender."""
    return json.loads((folder / "memory.json").read_text())["models"]["tiny"]["contenders"]  # type: ignore[no-any-return]


def test_it_leaves_a_table_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["memory.json", "memory.md", "memory.png"]
    document = json.loads((folder / "memory.json").read_text())
    tiny = document["models"]["tiny"]
    assert tuple(tiny["contenders"]) == CONTENDERS
    assert (tiny["parameters"], tiny["batch"]) == (PARAMETERS, 1)
    assert {row["how"] for row in tiny["contenders"].values()} == {MEASURED}
    assert document["command"].startswith("python -m benchmarks.memory --models tiny --backend aot")
    assert document["versions"]["torch"] == torch.__version__
    assert "aten::_scaled_mm" in document["method"]
    table = (folder / "memory.md").read_text()
    assert "tiny: 3 blocks of width 64, 0.2 M parameters, 1 x 32 tokens\n" in table
    assert table.count("\n| ") == 2 + len(CONTENDERS)
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_models_own_bytes(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        assert row["parameters"] == 2 * PARAMETERS
        assert row["gradients"] == (4 if name.endswith("+flat") else 2) * PARAMETERS
    caches = {name: row["cache"] for name, row in rows.items() if "+cached" in name}
    assert caches == {
        "tensorwise+cached": WEIGHTS + 2 * SCALE,
        "tensorwise+keep+cached+flat": 2 * (WEIGHTS + 2 * SCALE),
    }
    assert all(row["cache"] == 0 for name, row in rows.items() if name not in caches)


def test_a_kept_weight_is_a_byte_an_element_and_a_cached_one_nothing_more(rows: dict[str, dict[str, Any]]) -> None:
    kept = {name: row["after forward"] for name, row in rows.items()}
    assert kept["tensorwise+keep"] - kept["tensorwise"] == WEIGHTS - SCALE, "to cast it again takes its scale"
    assert kept["tensorwise"] - kept["tensorwise+cached"] == 2 * SCALE, "which the cache has, with 1 / scale"
    assert kept["tensorwise"] < kept["bf16"], "inputs are kept in float8"


def test_after_backward_the_loss_is_left_and_the_peak_is_above_what_forward_keeps(
    rows: dict[str, dict[str, Any]],
) -> None:
    for row in rows.values():
        assert row["after backward"] < 1000 < row["after forward"] < row["peak"]
        assert row["tokens/s"] > 0


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("name", ["bf16", "tensorwise+cached"])
def test_what_is_counted_from_two_blocks_is_what_three_take(name: str, rows: dict[str, dict[str, Any]]) -> None:
    counted = memory.counted(TINY, name, 1, "cpu", BACKEND)
    assert counted == {key: rows[name][key] for key in counted}


def test_the_shapes_have_the_parameters_that_they_are_named_after() -> None:
    assert round(memory.parameters(SHAPES["deit-base"]) / 1e6, 1) == 86.6
    assert round(memory.parameters(SHAPES["deit-570m"]) / 1e6) == 574


def test_what_is_done_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(result: Result, names: Any, device: str, backend: str, rounds: int, done: Any) -> None:
        result.rows["bf16"] = Row(COUNTED, dict.fromkeys((*memory.OWN, *memory.BEYOND), 10**6))
        done("bf16")
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "measure", measure)
    assert memory.main(arguments(tmp_path)) == 130
    assert json.loads((tmp_path / "memory.json").read_text())["models"]["tiny"]["contenders"]["bf16"]["peak"] == 10**6
    assert "| bf16 | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 | - | counted |" in (tmp_path / "memory.md").read_text()
    assert "stopped" in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"], "and nothing unfinished"


def test_an_unknown_contender_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        memory.main(arguments(tmp_path, "--contenders", "bf16", "delaid+flat"))
    assert stopped.value.code == 2
    assert "unknown recipe 'delaid'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
