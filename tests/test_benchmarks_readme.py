"""benchmarks/README.md is what its generator makes of the results that are committed; and the generator by itself."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.record import RESULTS, ROOT

ABOUT = {
    "command": "python -m benchmarks.memory --rounds 1",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef+",
    "versions": {"python": "3.11", "torch": "2.13", "torchao": None},
    "machine": "some machine",
}


def test_the_committed_readme_is_what_the_results_give() -> None:
    committed = readme.README.read_text(encoding="utf-8")
    assert committed == readme.readme(), "run: python -m benchmarks.readme"


def test_every_benchmark_and_every_result_has_its_place() -> None:
    known = {benchmark.name for benchmark in readme.BENCHMARKS}
    assert {path.stem for path in RESULTS.rglob("*.json")} <= known
    commands = {
        p.stem for p in (ROOT / "benchmarks").glob("*.py") if re.search(r"^NAME = ", p.read_text(), re.MULTILINE)
    }
    assert commands == known
    assert all(find_spec(f"benchmarks.{name}") for name in known)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((.*?)\)", readme.README.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (readme.README.parent / link).exists(), link


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Of one benchmark on two machines, one of them with more lines than are shown open."""
    results = tmp_path / "results"
    for folder, lines in ((results, 2), (results / "h200", readme.FOLDED + 1)):
        folder.mkdir()
        (folder / "memory.json").write_text(json.dumps({**ABOUT, "method": "how it was done"}))
        (folder / "memory.md").write_text("Made by something.\n\n| a |\n| --- |\n" + "| 1 |\n" * (lines - 2))
        (folder / "memory.png").write_bytes(b"")
    return results


def test_a_section_says_where_its_numbers_come_from(results: Path) -> None:
    text = readme.readme(results)
    label = "*some machine; python 3.11, torch 2.13; 2026-01-02, commit 0123456789 with changes; `python -m benchm"
    assert text.count(label) == 2
    assert "how it was done" in text
    assert "Made by something" not in text, "the label says it"
    assert "![memory](results/memory.png)" in text
    assert "![memory](results/h200/memory.png)" in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert text.index("results/memory.png") < text.index("<details>")


def test_what_has_no_results_is_named_with_its_command(results: Path) -> None:
    missing = readme.readme(results).partition("## No results yet")[2]
    for benchmark in readme.BENCHMARKS:
        assert (benchmark.command in missing) == (benchmark.name != "memory")


def test_check_says_that_it_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    assert readme.main(["--check"]) == 1
    assert "out of date: python -m benchmarks.readme" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0
