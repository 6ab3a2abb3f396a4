"""What this machine is: its GPUs, compilers, packages and settings, as far as float8 has to do with them.

Also what every file of results says of where it was made: `processor`, `versions`, `commit`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from float8_compile.torch_internals import scaled_mm

PACKAGES = ("float8_compile", "torch", "triton", "torchao")


@dataclass(frozen=True)
class Gpu:
    """One that torch can use.

    capability: NVIDIA's compute capability, or the digits of AMD's gfx name. memory: bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Machine:
    """What `look` found out. None is what isn't there.

    built_for: "CUDA 13.0", "ROCm 6.4", or "CPU". triton_wanted: the version that torch's own package asks for.
    driver: of an NVIDIA GPU, whether torch can use that or not. compiler: of C++, its path.
    cpu_gemm: how many times as long as in bfloat16 a float8 GEMM takes on the CPU; or what it raised.
    """

    system: str
    python: str
    torch: str
    built_for: str
    triton: str | None
    triton_wanted: str | None
    torchao: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    compiler: str | None
    cpu: str
    cpu_gemm: float | str
    graph_cache: bool
    precision_casts: bool


def look() -> Machine:
    """Ask this machine. Takes well under a second."""
    return Machine(
        system=platform.system(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        built_for=_built_for(),
        triton=installed("triton") or installed("pytorch-triton"),
        triton_wanted=_wanted_triton(),
        torchao=installed("torchao"),
        gpus=tuple(map(_gpu, range(torch.cuda.device_count()))) if torch.cuda.is_available() else (),
        driver=_driver(),
        compiler=next(filter(None, map(shutil.which, _compilers())), None),
        cpu=f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}",
        cpu_gemm=_cpu_gemm(),
        graph_cache=os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE", "1") != "0"
        and os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0") != "1",
        precision_casts=os.environ.get("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "0") == "1",
    )


def processor() -> str:
    """The CPU's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that numbers depend on; None for one that isn't there."""
    return {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES}


def commit(folder: Path) -> str | None:
    """The commit that is checked out there, with "+" where files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _built_for() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, (properties.major, properties.minor), properties.total_memory)


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _wanted_triton() -> str | None:
    """What torch's package asks for; its CPU build asks for none."""
    found = [re.match(r"(?:pytorch-)?triton\s*==\s*([\d.]+)", each) for each in requires("torch") or []]
    return next((match[1] for match in found if match), None)


def _driver() -> str | None:
    """Of NVIDIA's GPUs; None where there is none, or no `nvidia-smi`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _compilers() -> tuple[str, ...]:
    """Those that torch.compile would look for."""
    named = (os.environ.get("CXX") or "").split(" ")[0]
    others = ("cl",) if sys.platform == "win32" else ("g++", "clang++", "c++")
    return (named, *others) if named else others


def _cpu_gemm() -> float | str:
    """Seconds of a float8 GEMM over those of a bfloat16 one, the best of a few; or what it raises, in a line."""
    x, one = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(())
    x8 = x.to(torch.float8_e4m3fn)
    try:
        float8 = _seconds(lambda: scaled_mm(x8, x8.t(), one, one, out_dtype=torch.bfloat16))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).partition("\n")[0]
    return float8 / _seconds(lambda: x @ x.t())


def _seconds(function: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return min(once() for _ in range(5))
