"""What a preview found: graphs, their launches, the kernels behind these, and what crosses to backward. Plain data.

Bytes are counts, not measurements: each buffer of a launch once, as far as the launch reads or writes it. `sectors`
are bytes too: an access costs every 32-byte sector that it touches, for the best of the kernel's candidate configs.
Seconds are lower bounds: datasheet bandwidth and peak, as if each launch met both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["triton", "extern", "aten"]
Phase = Literal["forward", "backward", "inference"]
KINDS: tuple[Kind, ...] = ("triton", "extern", "aten")


@dataclass(frozen=True)
class Buffer:
    """One tensor that a launch reads or writes.

    name: the kernel's parameter, or the op's argument. tensor: the name in `Graph.code` of the memory behind it, the
        same in every launch of a graph that goes there: an input's name (`Saved.name`, in a backward graph) or a
        buffer's; "" for a result that nothing reads. reads, writes: bytes. sectors: of both, in sectors.
    """

    name: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    reads: int
    writes: int
    sectors: int


@dataclass(frozen=True)
class Launch:
    """One call of the generated code that runs something on the GPU.

    kind: "triton" a generated (or the user's own) Triton kernel, "extern" a GEMM, attention or convolution of a
        library, "aten" any other op that Inductor leaves to torch.
    name: the kernel's, or the op's ("aten._scaled_mm").
    layers: names of the modules that it serves, in order; "" is the model itself. In a backward graph those whose
        gradient, or recomputed forward, it is.
    nodes, ops: of the post-grad graph (`Graph.fx`) that it was made of, and their operators, each once.
    flops: of GEMMs and attention; 0 for everything else.
    seconds: a lower bound.
    """

    kind: Kind
    name: str
    layers: tuple[str, ...]
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    reads: int
    writes: int
    sectors: int
    dtypes: str
    flops: int
    seconds: float
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Config:
    """One of the configs that Inductor will time when a kernel first runs, and what it costs.

    sectors: bytes of one launch in sectors (of the first one, where several differ).
    The rest is None without `compile_kernels`. registers: a thread. spills: bytes of local memory a thread.
    shared: bytes a block. float8_conversions: instructions that convert to or from float8 in hardware.
    """

    kwargs: dict[str, Any]
    num_warps: int
    num_stages: int
    sectors: int
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    float8_conversions: int | None = None
    ptx: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel: Inductor's source (its decorators included) and its candidate configs."""

    name: str
    source: str = field(repr=False)
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor that a forward graph computes and keeps for backward. layers: those whose backward reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Total:
    """Of one kind of launch: how many, bytes read and written, the same in sectors, FLOPs, seconds as a bound."""

    count: int
    nbytes: int
    sectors: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class Graph:
    """One compiled graph.

    code: the Python that Inductor would run. fx: the graph that it was generated from, after Inductor's passes, as
    `GraphModule.print_readable` writes it.
    """

    phase: Phase
    launches: tuple[Launch, ...]
    kernels: dict[str, Kernel]
    saved: tuple[Saved, ...]
    code: str = field(repr=False)
    fx: str = field(repr=False)

    def total(self, kind: Kind | None = None) -> Total:
        """Of one kind of launch, or of all."""
        return _total(self.launches, kind)


@dataclass(frozen=True)
class Preview:
    """What Inductor would generate for `target`: graphs in the order in which they first run.

    seconds: what making the preview took. notes: what could not be modelled or counted; empty when all was.
    """

    target: str
    graphs: tuple[Graph, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Of all graphs, in order."""
        return tuple(launch for graph in self.graphs for launch in graph.launches)

    def total(self, kind: Kind | None = None) -> Total:
        """Of one kind of launch in all graphs, or of all."""
        return _total(self.launches, kind)

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers, for `json.dump`: every field, and the totals of each kind."""
        graphs = [asdict(g) | {"totals": {k: asdict(g.total(k)) for k in KINDS}} for g in self.graphs]
        totals = {kind: asdict(self.total(kind)) for kind in KINDS}
        return {
            "target": self.target,
            "totals": totals,
            "graphs": graphs,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def _total(launches: tuple[Launch, ...], kind: Kind | None) -> Total:
    if kind not in (None, *KINDS):
        raise ValueError(f"total of {kind!r}: expected one of {', '.join(map(repr, KINDS))}")
    chosen = [launch for launch in launches if kind in (None, launch.kind)]
    return Total(
        count=len(chosen),
        nbytes=sum(launch.reads + launch.writes for launch in chosen),
        sectors=sum(launch.sectors for launch in chosen),
        flops=sum(launch.flops for launch in chosen),
        seconds=sum(launch.seconds for launch in chosen),
    )
