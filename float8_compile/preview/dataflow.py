"""Who wrote what, and who reads it: the launches of one graph, joined by the tensors between them.

A storage is written more than once where Inductor uses it again, or changes it in place; what it holds after each
write is a `Value` of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from float8_compile.preview.result import Buffer, Graph, Launch
from float8_compile.preview.roles import is_float8_gemm


@dataclass(frozen=True)
class Value:
    """What a storage holds from one write to the next. version 0 is what the graph was given."""

    tensor: str
    version: int


@dataclass(frozen=True)
class Use:
    """A launch (its position in the graph) that reads or writes a value, and through which of its buffers."""

    launch: int
    buffer: Buffer


class Dataflow:
    """Of one graph. Buffers without a tensor's name join nothing."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[Value, list[Use]] = defaultdict(list)
        self.writer: dict[Value, Use] = {}
        self.reads: list[list[tuple[Value, Buffer]]] = []
        self.writes: list[list[tuple[Value, Buffer]]] = []
        versions: dict[str, int] = defaultdict(int)
        for position, launch in enumerate(graph.launches):
            named = [buffer for buffer in launch.buffers if buffer.tensor]
            self.reads.append([(Value(b.tensor, versions[b.tensor]), b) for b in named if b.reads])
            written = [buffer for buffer in named if buffer.writes]
            for name in {buffer.tensor for buffer in written}:
                versions[name] += 1
            self.writes.append([(Value(b.tensor, versions[b.tensor]), b) for b in written])
            for value, buffer in self.reads[-1]:
                self.readers[value].append(Use(position, buffer))
            for value, buffer in self.writes[-1]:
                self.writer[value] = Use(position, buffer)

    @cached_property
    def gemms(self) -> list[int]:
        """Positions of the GEMMs whose operands are float8."""
        return [at for at, launch in enumerate(self.graph.launches) if is_float8_gemm(launch)]

    def after(self, position: int, through: Callable[[Launch], bool]) -> Iterator[int]:
        """Launches that read what this one writes, in order; and of those that `through` says yes to, the readers."""
        reached, found = [position], set[int]()
        for at in reached:
            for value, _ in self.writes[at]:
                for use in self.readers[value]:
                    if use.launch not in found:
                        found.add(use.launch)
                        reached += [use.launch] if through(self.graph.launches[use.launch]) else []
        yield from sorted(found)
