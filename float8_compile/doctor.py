"""What this machine, torch, triton and driver can and cannot do for float8, and the remedy for each thing they can't.

machine.py asks the machine, `examine` judges the answers: so the judgements can be tested on machines that nobody here
has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from float8_compile.machine import Machine, look

Status = Literal["OK", "warn", "no"]

TESTED = ((2, 11), (2, 14))  # torch, from and up to
TRITON_OF_TORCH = {(2, 11): "3.6", (2, 13): "3.7", (2, 14): "3.8"}
FLOAT8_CAPABILITY = (8, 9)  # NVIDIA's, from here on there is a float8 GEMM


@dataclass(frozen=True)
class Finding:
    """One line: what it is about, how it stands, and what to do about it ("" for nothing)."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5}{self.subject:<18}{self.text}{f' -> {self.remedy}' if self.remedy else ''}"


def doctor() -> str:
    """All findings about this machine, a line each."""
    return "\n".join(map(str, examine(look())))


def examine(machine: Machine) -> tuple[Finding, ...]:
    """The findings, the most basic first."""
    checks: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        _torch, _triton, _torchao, _gpus, _compiler, _cpu, _preview, _cache, _known_bugs,
    )  # fmt: skip
    return tuple(finding for check in checks for finding in check(machine))


def _torch(m: Machine) -> Iterator[Finding]:
    text = f"{m.torch}, built for {m.built_for}, Python {m.python}, {m.system}"
    oldest, newest = (".".join(map(str, each)) for each in TESTED)
    if _numbers(m.torch) < TESTED[0]:
        yield Finding("no", "torch", text, f"float8_compile needs {oldest} or newer: pip install -U torch")
    elif _numbers(m.torch) > TESTED[1]:
        yield Finding("warn", "torch", text, f"newer than {newest}, the newest one that was tried: run scripts/test")
    else:
        yield Finding("OK", "torch", text)


def _triton(m: Machine) -> Iterator[Finding]:
    wanted = m.triton_wanted or TRITON_OF_TORCH.get(_numbers(m.torch))
    install = (
        f"pip install 'triton=={wanted}.*'" if wanted and wanted.count(".") == 1 else f"pip install triton=={wanted}"
    )
    install = install if wanted else "pip install the triton of this torch's release notes"
    if m.triton is None:
        why = "Linux only" if m.system != "Linux" else "not installed"
        yield Finding("no", "triton", f"{why}: nothing compiles for a GPU, and there is no preview", install)
    elif wanted and not f"{m.triton}.".startswith(f"{wanted}."):
        yield Finding("warn", "triton", f"{m.triton}, but torch {m.torch} goes with {wanted}", install)
    elif not wanted:
        yield Finding("warn", "triton", f"{m.triton}; which one fits torch {m.torch} isn't known here", install)
    else:
        yield Finding("OK", "triton", f"{m.triton}, fits torch")


def _torchao(m: Machine) -> Iterator[Finding]:
    if m.torchao:
        yield Finding("OK", "torchao", f"{m.torchao} (needed only to compare with it)")
    else:
        yield Finding("warn", "torchao", "not installed, so a preview can't compare with it", "pip install torchao")


def _gpus(m: Machine) -> Iterator[Finding]:
    for gpu in m.gpus:
        text = f"{gpu.name}, {gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory / 2**30:.0f} GiB, driver {m.driver}"
        if m.built_for.startswith("ROCm"):
            yield Finding("warn", "GPU", f"{text}: float8 needs MI300 or newer, and was never tried here on one")
        elif gpu.capability >= FLOAT8_CAPABILITY:
            yield Finding("OK", "GPU", f"{text}: float8 GEMMs")
        else:
            yield Finding(
                "no", "GPU", f"{text}: no float8 GEMM, which needs compute capability 8.9",
                "emulate it with config=dataclasses.replace(Recipe.from_name(...), emulate=True)",
            )  # fmt: skip
    if not m.gpus and m.driver and m.built_for == "CPU":
        text = f"an NVIDIA driver ({m.driver}), but torch is a CPU build"
        yield Finding("no", "GPU", text, "install the CUDA build: pytorch.org/get-started")
    elif not m.gpus and m.driver:
        text = f"an NVIDIA driver ({m.driver}), but torch ({m.built_for}) can't use the GPU"
        yield Finding("no", "GPU", text, "update the driver, and look at CUDA_VISIBLE_DEVICES")
    elif not m.gpus:
        yield Finding("no", "GPU", "none: models train on the CPU, slowly", "`preview` shows what a GPU would run")


def _compiler(m: Machine) -> Iterator[Finding]:
    if m.compiler:
        yield Finding("OK", "C++ compiler", m.compiler)
    else:
        yield Finding(
            "no", "C++ compiler", "none, so torch.compile works neither for the CPU nor for a GPU",
            "apt install g++, or name one in CXX",
        )  # fmt: skip


def _cpu(m: Machine) -> Iterator[Finding]:
    if isinstance(m.cpu_gemm, str):
        yield Finding("no", "CPU float8 GEMM", f"{m.cpu}: {m.cpu_gemm}", "emulate=True, see Recipe")
    elif m.cpu_gemm > 1:
        text = f"{m.cpu}: runs, {m.cpu_gemm:.1f} times as long as bfloat16: right, but no measure of speed"
        yield Finding("warn", "CPU float8 GEMM", text)
    else:
        yield Finding("OK", "CPU float8 GEMM", f"{m.cpu}: runs, {m.cpu_gemm:.2f} of the time of bfloat16")


def _preview(m: Machine) -> Iterator[Finding]:
    if m.triton is not None and TESTED[0] <= _numbers(m.torch) <= TESTED[1]:
        yield Finding("OK", "preview", "python -m float8_compile preview package.module:build --target H100")
    else:
        yield Finding("no", "preview", "needs triton and a torch that was tried", "see above")


def _cache(m: Machine) -> Iterator[Finding]:
    if m.graph_cache:
        yield Finding("OK", "FX graph cache", "on: a second process compiles faster")
    else:
        remedy = "unset TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_FORCE_DISABLE_CACHES"
        yield Finding("warn", "FX graph cache", "off: each process compiles anew", remedy)


def _known_bugs(m: Machine) -> Iterator[Finding]:
    if not m.precision_casts:
        text = "RMSNorm with row-wise float8 gave NaN in compiled GPU code (pytorch 150859)"
        yield Finding("warn", "known bug", text, "if you see that: TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1")
    if _numbers(m.torch) >= (2, 14):
        text = "Triton 3.8 can miscompile a transposed float8 store beside clamp (triton 11111): our casts avoid it"
        yield Finding("warn", "known bug", text, "torchao's casts don't: compare its losses before you trust them")


def _numbers(text: str) -> tuple[int, int]:
    """ "2.13.0+cpu" -> (2, 13)."""
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)
