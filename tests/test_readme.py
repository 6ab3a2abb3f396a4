"""README.md keeps its word: its Python runs, its commands are there, its links lead somewhere."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def blocks(language: str, text: str | None = None) -> list[str]:
    """The fenced blocks of a language, as they stand in the README or in the text."""
    if text is None:
        text = README.read_text() if README.exists() else ""
    return re.findall(rf"^```{language}[ \t]*\n(.*?)^```[ \t]*$", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """What each line of a shell block runs: its first word, after a prompt and VARIABLE=value."""
    lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    words = [[word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)] for line in lines]
    return [line[0] for line in words if line]


def is_there(command: str) -> bool:
    """A script of the project that can be run, or what every machine has: a program, a word of the shell."""
    if command == "python":
        return True  # that of the environment that this runs in
    if "/" in command:
        return bool(shutil.which(ROOT / command))
    return subprocess.run(["bash", "-c", 'type "$0"', command], capture_output=True).returncode == 0


def test_there_is_a_readme_with_an_example_and_the_two_commands() -> None:
    assert README.exists(), "README.md is missing"
    assert blocks("python"), "README.md has no ```python block"
    assert {"scripts/train", "scripts/test"} <= {command for block in blocks("bash") for command in commands(block)}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.strip().splitlines()[0])
def test_its_python_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace and a folder of its own; compiled by AOTAutograd, not by Inductor, which would take minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("(?:bash|sh|console)"), ids=lambda block: block.strip().splitlines()[0])
def test_its_commands_are_there(block: str) -> None:
    assert [command for command in commands(block) if not is_there(command)] == []


def test_its_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text() if README.exists() else "")
    assert [link for link in links if not (ROOT / link).exists()] == []


# The checks themselves


def test_blocks_are_found_by_their_language() -> None:
    text = "a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n```python\ny = '```'\n```\n```\nplain\n```\n"
    assert blocks("python", text) == ["x = 1\n", "y = '```'\n"]
    assert blocks("bash", text) == ["ls\n"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("scripts/train --steps 60   # a minute\n", ["scripts/train"]),
        ("$ GPU=0 scripts/test -k cast\n\n# nothing\ncd runs\n", ["scripts/test", "cd"]),
        ("scripts/train \\\n  --steps 60\n", ["scripts/train"]),
    ],
)
def test_a_command_is_a_lines_first_word(block: str, expected: list[str]) -> None:
    assert commands(block) == expected


@pytest.mark.parametrize(
    ("command", "there"),
    [("scripts/test", True), ("cd", True), ("git", True), ("scripts/tset", False), ("README.md", False)],
)
def test_a_command_that_is_not_there_would_be_missed(command: str, there: bool) -> None:
    assert is_there(command) == there
