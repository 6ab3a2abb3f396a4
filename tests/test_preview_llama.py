"""The figures of the Llama-3-8B layer, pinned for the torch they were counted with, and the command that makes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from previews import BF16, CAST, E4M3, graph, launch, reads, writes
from previews import preview as made_by_hand

from float8_compile import Recipe
from float8_compile.preview.result import Preview
from float8_compile.variants import quiet

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import preview_llama
from benchmarks.record import circumstances, markdown, write

# Triton kernels of forward and backward for an H100, and GB in sectors, as `python -m benchmarks.preview_llama` says.
PINNED = {"bf16": (19, 4.73), "tensorwise": (70, 8.49), "delayed": (46, 6.31), "delayed+keep+cached": (32, 5.00)}
TORCH = (2, 13)

pinned_torch = pytest.mark.skipif(
    not (TORCH <= torch.__version__ < (2, 14)),  # type: ignore[operator]
    reason=f"counted with torch 2.13; torch {torch.__version__} has another Inductor",
)


@pinned_torch
@pytest.mark.parametrize("recipe", PINNED)
def test_launches_and_bytes_of_the_llama_layer(recipe: str) -> None:
    with quiet():
        found = preview_llama.preview(preview_llama.build(recipe), "H100").total("triton")
    assert (found.count, round(found.sectors / 1e9, 2)) == PINNED[recipe]


# The command, with previews made by hand


def small(gigabytes: int = 1) -> Preview:
    size = gigabytes * 10**6
    return made_by_hand(graph(launch(reads(BF16, (size, 400)), writes(E4M3, (size, 200)), ops=CAST)))


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Previews made by hand, and Ctrl-C at the third. The list: the targets that were asked for."""
    asked: list[str] = []

    def preview(make: Any, target: str) -> Preview:
        asked.append(target)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return small(len(asked))

    monkeypatch.setattr(preview_llama, "preview", preview)
    return asked


def test_it_leaves_a_table_numbers_and_a_picture(
    by_hand: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview_llama.main(["--recipes", "bf16", "delayed", "--target", "B200", "--out", str(tmp_path)]) == 0
    assert by_hand == ["B200", "B200"]
    document = json.loads((tmp_path / "preview_llama.json").read_text())
    assert list(document["recipes"]) == ["bf16", "delayed"]
    assert document["recipes"]["delayed"]["totals"]["triton"]["sectors"] == 2 * 10**9
    assert document["recipes"]["delayed"]["triton"] == {"forward cast": {"count": 1, "sectors": 2 * 10**9}}
    assert document["command"].startswith("python -m benchmarks.preview_llama --recipes bf16 delayed --target B200")
    assert document["versions"]["torch"] == torch.__version__
    assert "cores" in document["machine"]
    table = (tmp_path / "preview_llama.md").read_text()
    assert "| delayed | 1 | 2.00 | 2.00 | 0 | 0 | 0.0 | 0.60 |" in table
    assert (tmp_path / "preview_llama.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"^bf16 \(\d+ s\): H100, forward: 1\.00 GB in sectors", printed, re.MULTILINE)
    assert printed.splitlines()[-1].endswith("preview_llama.json, .md, .png")


def test_what_is_done_survives_an_interruption(
    by_hand: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview_llama.main(["--out", str(tmp_path)]) == 130
    document = json.loads((tmp_path / "preview_llama.json").read_text())
    assert list(document["recipes"]) == list(preview_llama.RECIPES[:2])
    assert "stopped" in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"], "and nothing unfinished"


def test_an_unknown_recipe_is_refused_before_any_work(by_hand: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        preview_llama.main(["--recipes", "bf16", "delaid"])
    assert (stopped.value.code, by_hand) == (2, [])
    assert "unknown recipe 'delaid'" in capsys.readouterr().err


def test_all_recipes_are_in_the_table() -> None:
    assert set(preview_llama.RECIPES) > {"bf16", "torchao:rowwise", "delayed+keep", *Recipe.names()}
    assert len(set(preview_llama.RECIPES)) == len(preview_llama.RECIPES)


def test_layers_that_read_the_same_tensor_share_a_scale() -> None:
    with torch.device("meta"):
        layer, own = (preview_llama.build(recipe)()[0] for recipe in ("delayed", "delayed+own scales"))
    assert layer.attention.wk.input_scale is layer.attention.wv.input_scale is layer.attention.wq.input_scale
    assert layer.feed_forward.w3.input_scale is layer.feed_forward.w1.input_scale
    assert own.attention.wk.input_scale is not own.attention.wq.input_scale


# Records


def test_a_record_says_where_its_numbers_come_from() -> None:
    record = circumstances("a command")
    assert set(record) == {"command", "date", "commit", "versions", "machine"}
    assert record["commit"] is None or len(record["commit"].rstrip("+")) == 40
    assert json.dumps(record)


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "results" / "a.md", "new\n")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["a.md"]


def test_a_markdown_table() -> None:
    rows = [{"recipe": "bf16", "GB": "4.73"}, {"recipe": "delayed", "GB": "6.31"}]
    assert markdown(rows) == "| recipe | GB |\n| --- | ---: |\n| bf16 | 4.73 |\n| delayed | 6.31 |\n"
