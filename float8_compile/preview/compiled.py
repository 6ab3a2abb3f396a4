"""A Triton kernel's configs as machine code for a GPU that isn't there: registers, spills, shared memory, PTX.

Triton compiles with the ptxas in its own wheel; what a kernel uses is read with the cuobjdump beside it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from float8_compile.preview import inductor
from float8_compile.preview.sectors import TritonKernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_FLOAT8_CONVERSION = re.compile(r"\bcvt\.[\w.]*(?:e4m3|e5m2)")


def usage(kernel: TritonKernel) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each of the kernel's configs that compiles, and the fields of `result.Config` that this gives."""
    for config, binary in inductor.compile_configs(kernel.tuner):
        ptx = binary.asm["ptx"]
        conversions = len(_FLOAT8_CONVERSION.findall(ptx))
        found = _resources(binary.asm["cubin"])
        yield config, {**found, "shared": binary.metadata.shared, "float8_conversions": conversions, "ptx": ptx}


def _resources(cubin: bytes) -> dict[str, int]:
    """registers and spills of a cubin; nothing where the tool is missing."""
    if not CUOBJDUMP.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "spills": max(int(found["STACK"]), int(found["LOCAL"]))}
