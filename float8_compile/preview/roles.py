"""What a launch is for, and how tables name it and the layers that it serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from float8_compile.preview.result import Buffer, Launch

Role = Literal["cast", "GEMM", "attention", "other"]
ROLES: tuple[Role, ...] = get_args(Role)

TEMPLATE = "triton_tem_"  # how Inductor names its own GEMMs and attention in Triton
SMALL = 1 / 64  # of a launch's bytes: scales, amaxes and the like are below

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def role(launch: Launch) -> Role:
    """ "cast": writes float8, or takes an amax; a producer that is fused with a cast is one. "GEMM", "attention": the
    libraries' kernels. "other": the rest."""
    if launch.kind == "extern" or launch.name.startswith(TEMPLATE):
        return "attention" if "attention" in launch.name else "GEMM"
    writes_float8 = any(is_float8(buffer) and buffer.writes for buffer in launch.buffers)
    return "cast" if writes_float8 or takes_amax(launch) else "other"


def takes_amax(launch: Launch) -> bool:
    """Whether it is a kernel that computes the largest magnitude of something."""
    return launch.kind == "triton" and ("amax" in operators(launch) or {"abs", "max"} <= operators(launch))


def operators(launch: Launch) -> set[str]:
    """ "amax" for aten.amax.default."""
    return {op.removeprefix("torch.ops.").split(".")[1] for op in launch.ops if "." in op}


def only_takes_amax(launch: Launch) -> bool:
    """Whether it reads something in order to reduce it, an amax among others, and writes nothing of any size."""
    return takes_amax(launch) and launch.writes <= SMALL * launch.reads


def only_moves_float8(launch: Launch) -> bool:
    """Whether float8 goes in and float8 comes out, and nothing else of any size."""
    buffers = large(launch.buffers)
    return (
        launch.kind != "extern"
        and all(map(is_float8, buffers))
        and any(buffer.reads for buffer in buffers)
        and any(buffer.writes for buffer in buffers)
    )


def is_float8(buffer: Buffer) -> bool:
    """Whether it holds float8."""
    return buffer.dtype.startswith("float8")


def is_float8_gemm(launch: Launch) -> bool:
    """Whether it multiplies float8 matrices, which are its first two buffers."""
    return launch.kind == "extern" and len(launch.buffers) > 2 and all(map(is_float8, launch.buffers[:2]))


def large(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Those that hold more than a small share of what the launch moves."""
    buffers = list(buffers)
    least = SMALL * sum(buffer.reads + buffer.writes for buffer in buffers)
    return [buffer for buffer in buffers if buffer.reads + buffer.writes > least]


def dtypes(launch: Launch) -> str:
    """ "bf16 -> e4m3, bf16": what is read and what is written, without the small ones."""
    buffers = large(launch.buffers)
    sides = [[b.dtype for b in buffers if b.reads], [b.dtype for b in buffers if b.writes]]
    return " -> ".join(", ".join(dict.fromkeys(map(short_dtype, side))) or "-" for side in sides)


def short_dtype(name: str) -> str:
    """ "bf16", "e4m3": a dtype's name in a table."""
    return _SHORT.get(name, name.removeprefix("float8_").removesuffix("fn"))


def layer_names(layers: Sequence[str], most: int = 3) -> str:
    """ "attention.wq, .wk, .wv and 2 more": a name's beginning is left out where it is that of the one before."""
    shown, before = [], ""
    for layer in layers[:most]:
        parent = layer.rpartition(".")[0]
        shown.append(layer[len(parent) :] if parent and parent == before else layer or "(the model)")
        before = parent
    more = f" and {len(layers) - most} more" if len(layers) > most else ""
    return ", ".join(shown) + more


def shortened(text: str, width: int) -> str:
    """At most so many characters, the middle left out: a kernel's name says most at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
