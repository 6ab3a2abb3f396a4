"""The overhead benchmark from its command to its files, with little to convert, and one layer that nothing is generated
for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import overhead
from benchmarks.fresh_start import import_seconds
from float8_compile.variants import quiet

pytestmark = pytest.mark.xdist_group("overhead")  # all read one run
FEW = [
    "--rounds", "2", "--import-rounds", "1", "--linears", "3", "--layers", "1", "--compile-rounds", "1",
    "--backend", "aot_eager",
]  # fmt: skip
CONTENDERS = ["bf16", "tensorwise"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left."""
    folder = tmp_path_factory.mktemp("overhead")
    with torch.random.fork_rng():
        assert overhead.main([*FEW, "--contenders", *CONTENDERS, "--compile", "bf16", "--out", str(folder)]) == 0
    return folder


def test_it_leaves_a_table_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".md", ".png"]
    found: dict[str, Any] = json.loads((folder / "overhead.json").read_text())
    assert list(found["imports"]) == list(found["eager"]) == CONTENDERS
    assert list(found["conversion"]) == CONTENDERS[1:]
    assert all(0 < of["p5"] <= of["median"] for part in ("imports", "conversion") for of in found[part].values())
    assert all(set(of) == {"forward", "forward + backward"} for of in found["eager"].values())
    compiled = found["compile"]["bf16"]
    assert len(compiled["samples"]["cold"]) == len(compiled["samples"]["warm"]) == 1
    assert 50 < compiled["forward"] < compiled["backward"], "nodes, of all that a layer computes"
    assert found["versions"]["torch"] == torch.__version__
    table = (folder / "overhead.md").read_text()
    assert table.count("\n| ") == 2 + len(CONTENDERS)
    assert "compile warm, s" in table
    assert (folder / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_a_column_for_each_part_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        given = [*FEW, "--parts", "conversion", "--contenders", "bf16", "delayed", "--out", str(tmp_path)]
        assert overhead.main(given) == 0
    table = (tmp_path / "overhead.md").read_text()
    assert "|  | convert, ms |\n" in table
    assert "| delayed | " in table
    assert "| bf16" not in table, "there is nothing to convert"
    assert table in capsys.readouterr().out


def test_what_is_done_survives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_start(name: str, *_: Any, **__: Any) -> dict[str, Any]:
        if name == "delayed":
            raise RuntimeError("no compiler")
        return {"seconds": 1.5, "forward": 7, "backward": None}

    monkeypatch.setattr(overhead, "compile_start", compile_start)
    given = [*FEW, "--parts", "compile", "--compile", "bf16", "delayed", "--out", str(tmp_path)]
    assert overhead.main(given) == 1
    assert "failed: no compiler" in capsys.readouterr().err
    assert "| bf16 | 7.00 | - | 1.50 | 1.50 | 1.50 |" in (tmp_path / "overhead.md").read_text()


def test_a_failing_process_says_why() -> None:
    with pytest.raises(RuntimeError, match="No module named 'no_such_package'"):
        import_seconds("no_such_package")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--contenders", "delaid"], "unknown recipe 'delaid'"),
        (["--compile", "delaid"], "unknown recipe 'delaid'"),
        (["--parts", "sleep"], "--parts"),
        (["--import-rounds", "0"], "0 is less than 1"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        overhead.main([*given, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_converter_converts() -> None:
    for name, package in (("torchao:rowwise", "torchao"), ("rowwise", "float8_compile")):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, dtype=torch.bfloat16))
        with quiet():
            overhead.converter(name, model)()
        assert type(model[0]).__module__.startswith(package)
