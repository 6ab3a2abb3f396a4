"""benchmarks/README.md, made from the results: what each benchmark shows, its command, its table and its picture.

    python -m benchmarks.readme            # writes it
    python -m benchmarks.readme --check    # says whether it is what the results give

Of each benchmark there is NAME.json, which says where its numbers come from, NAME.md with its tables and NAME.png, in
benchmarks/results/ or, made on another machine, in a folder below it. What has no results yet is named at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write

README = RESULTS.parent / "README.md"
FOLDED = 24  # lines of tables; more of them are folded away


@dataclass(frozen=True)
class Benchmark:
    """One section. shows: what it is for, and how to read it."""

    name: str
    title: str
    shows: str
    takes: str

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.name}"


BENCHMARKS = (
    Benchmark(
        "linear",
        "One linear layer",
        "Forward and backward of single layers, with what they save for backward and how many kernels they run, in "
        "each recipe, beside `nn.Linear` and torchao's. Nothing around them is there to fuse with.",
        "6 minutes on two cores",
    ),
    Benchmark(
        "block",
        "One transformer block",
        "Time, memory and compile time of a whole block, where casts are fused with what stands around the linears; "
        "with activation checkpointing and without.",
        "15 minutes on two cores",
    ),
    Benchmark(
        "train_step",
        "A training step",
        "What `scripts/train`'s user waits for: whole steps of its language model, with the optimizer, and forward and "
        "backward alone, in each recipe, beside bfloat16 and torchao's same recipe.",
        "5 minutes on two cores",
    ),
    Benchmark(
        "preview_llama",
        "What Inductor generates for a Llama layer",
        "Kernels, bytes and a bound on the time of one Llama-3-8B layer, forward and backward, on a GPU that nobody "
        "needs to have. Counted, not measured.",
        "3 minutes on two cores",
    ),
    Benchmark(
        "preview_accuracy",
        "The preview, held against a GPU",
        "Whether the kernels that the preview shows are those that run, and how near each comes to the bound that the "
        "preview gives it.",
        "a GPU, 2 minutes",
    ),
    Benchmark(
        "cuda_graphs",
        "CUDA graphs",
        "What a training step takes with launches one by one, with `torch.compile(mode=\"reduce-overhead\")` and with "
        "`make_graphed_callables`.",
        "a GPU, 1 minute",
    ),
    Benchmark(
        "memory",
        "Memory of training",
        "What forward keeps for backward, what is alive after it, and the peak, of two vision transformers: the price "
        "of keeping, caching and casting again.",
        "5 minutes on two cores",
    ),
    Benchmark(
        "fsdp_memory",
        "Memory and traffic with FSDP2",
        "What a rank sends to all-gathers and keeps, with weights gathered in bfloat16 and in float8.",
        "2 minutes on two cores",
    ),
    Benchmark(
        "train_curves",
        "How recipes learn",
        "The held-out loss of a small language model in each recipe, over several seeds, as a difference to bfloat16's "
        "run with the same seed. `bf16+nudge` is bfloat16 with weights that differ by a thousandth at the start: what "
        "is no further from bf16 than that has parted by chance.",
        "15 minutes on two cores",
    ),
    Benchmark(
        "overhead",
        "Around the computing",
        "What a user waits for: imports, conversion, an eager call, graph nodes, compiling with an empty and with a "
        "full cache, ours and torchao's.",
        "15 minutes on two cores",
    ),
    Benchmark(
        "eager_cost",
        "A call of a small layer",
        "What dispatch and Python cost where there is little to compute, eagerly and compiled.",
        "3 minutes on two cores",
    ),
)  # fmt: skip

INTRODUCTION = """\
<!-- Made by `python -m benchmarks.readme` from benchmarks/results: change that, not this. -->
# Benchmarks

Each command leaves a JSON file with all numbers and their circumstances, a table and a picture in `results/`, or in
`--out FOLDER`, and rewrites them as it goes, so Ctrl-C loses nothing. Contenders take turns, and what is shown are
medians. Run the commands in the project's folder, with `.venv/bin/python` and `PYTHONPATH=scripts`; after new results
run `python -m benchmarks.readme`. On a machine with a GPU, `scripts/gpu_check` runs those that need one.

Numbers are those of the machine above them. On a CPU, float8 GEMMs are mostly computed in float32: counts and bytes
hold for any machine, times there say nothing about a GPU. What was tried and did not help is in [LOG.md](LOG.md).
"""


def readme(results: Path = RESULTS) -> str:
    """All of it."""
    found = {benchmark: list(results_of(benchmark, results)) for benchmark in BENCHMARKS}
    parts = [INTRODUCTION]
    parts += [section(benchmark, places, results) for benchmark, places in found.items() if places]
    if missing := [benchmark for benchmark, places in found.items() if not places]:
        lines = [f"* **{b.title}**: `{b.command}` ({b.takes}). {b.shows}" for b in missing]
        parts.append("\n".join(["## No results yet", "", *lines, ""]))
    return "\n".join(parts)


def results_of(benchmark: Benchmark, results: Path) -> Iterator[Path]:
    """Its JSON files: those of the machine without a name first, then folder by folder."""
    for folder in [results, *sorted(path for path in results.iterdir() if path.is_dir())]:
        if (path := folder / f"{benchmark.name}.json").exists():
            yield path


def section(benchmark: Benchmark, files: Sequence[Path], results: Path) -> str:
    """One benchmark, with the results of each machine."""
    lines = [f"## {benchmark.title}", "", benchmark.shows, "", "```bash", f"{benchmark.command}  # {benchmark.takes}"]
    return "\n".join([*lines, "```", "", *(line for path in files for line in shown(path, results))])


def shown(path: Path, results: Path) -> Iterator[str]:
    """The results of one machine: where they come from, table and picture."""
    about = json.loads(path.read_text(encoding="utf-8"))
    yield label(about)
    yield ""
    if "method" in about:
        yield about["method"]
        yield ""
    tables = tables_of(path.with_suffix(".md"))
    lines = tables.count("\n") + 1
    if tables:
        fold = lines > FOLDED
        yield from (["<details><summary>Tables</summary>", "", tables, "", "</details>"] if fold else [tables])
        yield ""
    if (picture := path.with_suffix(".png")).exists():
        yield f"![{path.stem}]({picture.relative_to(results.parent).as_posix()})"
        yield ""


def label(about: dict[str, Any]) -> str:
    """Where the numbers come from, in a line."""
    commit = about.get("commit") or "an unknown commit"
    changed = " with changes" if commit.endswith("+") else ""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    return (
        f"*{about['machine']}; {versions}; {about['date'][:10]}, commit {commit.rstrip('+')[:10]}{changed}; "
        f"`{about['command']}`*"
    )


def tables_of(path: Path) -> str:
    """What a benchmark has written for people, without the first paragraph, which says what the label says."""
    if not path.exists():
        return ""
    _, _, tables = path.read_text(encoding="utf-8").partition("\n\n")
    return tables.strip().replace("\n\n\n", "\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file, or says that it isn't up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where it is out of date")
    given = parser.parse_args(arguments)
    text = readme()
    if not given.check:
        write(README, text)
        print(f"wrote {README}")
    elif not README.exists() or README.read_text(encoding="utf-8") != text:
        print(f"{README} is out of date: python -m benchmarks.readme", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
