"""The parts, in order of value, so that half a run is still worth having."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TORCHAO = "torchao:"
TESTS = "tests_gpu"


@dataclass(frozen=True)
class Part:
    """One command. limit: seconds. leaves: the file in the folder without which nothing was shown."""

    name: str
    what: str
    command: tuple[str, ...]
    limit: float
    leaves: str


def parts(folder: Path, dry: bool) -> list[Part]:
    """All of them; `dry`: with shapes so small that a CPU takes seconds, and nothing generated or compared."""
    few = ["--rounds", "2", "--backend", "aot_eager"]
    memory = ["--rounds", "1", "--backend", "aot_eager_decomp_partition"]
    return [
        tests(folder, dry),
        benchmark(
            "linear", "single layers, ours, torchao's and bf16", 120, folder,
            ["--shapes", "small", "--dtypes", "bf16", "--contenders", "nn.Linear", "tensorwise", *few] if dry else
            ["--shapes", "8b-up", "w13", "small", "--dtypes", "bf16", "--rounds", "20",
             "--contenders", "nn.Linear", *with_torchao("tensorwise"), "tensorwise", "delayed", "rowwise"],
        ),
        benchmark(
            "preview_accuracy", "the preview, held against the kernels that run", 110, folder,
            ["--contenders", "bf16", "delayed", *few] if dry else [],
        ),
        benchmark(
            "block", "a transformer block", 140, folder,
            ["--models", "llama-tiny", "--contenders", "bf16", "tensorwise",
             "--compile-rounds", "0", *few] if dry else
            ["--models", "llama-3-8b", "--rounds", "20", "--compile-rounds", "0",
             "--contenders", "bf16", *with_torchao("tensorwise"), "tensorwise", "delayed", "rowwise"],
        ),
        benchmark(
            "memory", "memory of training", 60, folder,
            ["--models", "tiny", "--contenders", "bf16", "tensorwise", *memory] if dry else
            ["--models", "deit-base", "--rounds", "10",
             "--contenders", "bf16", *with_torchao("tensorwise"), "tensorwise", "tensorwise+keep",
             "tensorwise+cached", "delayed", "delayed+keep+cached"],
        ),
        benchmark(
            "cuda_graphs", "steps with and without CUDA graphs", 50, folder,
            ["--contenders", "bf16", "delayed", *few] if dry else [],
        ),
    ]  # fmt: skip


def tests(folder: Path, dry: bool) -> Part:
    """tests/gpu, by several processes where that is possible: most of their time is compiling."""
    leaves = f"{TESTS}.xml"
    parallel = ["-n", "8"] if not dry and find_spec("xdist") else []
    report = ["-rs", "-p", "no:cacheprovider", f"--junitxml={folder / leaves}"]
    command = (sys.executable, "-m", "pytest", "tests/gpu", *report, *parallel)
    return Part(TESTS, "tests/gpu", command, 150, leaves)


def benchmark(name: str, what: str, limit: float, folder: Path, arguments: Sequence[str]) -> Part:
    """One of benchmarks/, which leaves its files in the folder."""
    command = (sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", str(folder))
    return Part(name, what, command, limit, f"{name}.json")


def with_torchao(*recipes: str) -> list[str]:
    """Torchao's, where it is installed."""
    return [TORCHAO + recipe for recipe in recipes] if find_spec("torchao") else []
