"""Compilation as behaviour: one graph, no recompilation, how many nodes, what is saved for backward.

The vocabulary of every feature's test. All of it asks AOTAutograd with Inductor's own partitioner and
decompositions, but generates no code, so it is quick.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V


@dataclass
class Graphs:
    """The forward and backward graphs of each compilation, in order."""

    forward: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[torch.fx.GraphModule] = field(default_factory=list)

    def node_counts(self) -> tuple[int, int]:
        return sum(len(g.graph.nodes) for g in self.forward), sum(len(g.graph.nodes) for g in self.backward)

    def calls(self, name: str) -> tuple[int, int]:
        """How often ops whose name contains `name` are called: forward, backward."""

        def count(graphs: list[torch.fx.GraphModule]) -> int:
            return sum(n.op == "call_function" and name in str(n.target) for g in graphs for n in g.graph.nodes)

        return count(self.forward), count(self.backward)

    def saved(self) -> list[Tensor]:
        """Fake tensors that cross from forward to backward and are no inputs of the forward graph."""
        crossing = []
        for graph in self.forward:
            outputs = graph.graph.output_node().args[0]
            assert isinstance(outputs, (tuple, list))
            names = {n.name for b in self.backward for n in b.graph.nodes if n.op == "placeholder"}
            crossing += [
                o.meta["val"]
                for o in outputs
                if isinstance(o, torch.fx.Node)
                and o.op != "placeholder"
                and o.name in names
                and isinstance(o.meta["val"], Tensor)
            ]
        return crossing


def graphs_of(run: Callable[[Callable[..., Any]], Any], fn: Callable[..., Any], **options: Any) -> Graphs:
    """The graphs that `run(compiled fn)` compiles; `run` should call backward as well."""
    graphs = Graphs()

    def keep(into: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            into.append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    def partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        # Inductor's own step: it rewrites the joint graph before it splits it.
        with V.set_fake_mode(detect_fake_mode(inputs)):
            return partition_fn(joint, inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=keep(graphs.forward),
        bw_compiler=keep(graphs.backward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    run(torch.compile(fn, backend=backend, fullgraph=options.pop("fullgraph", True), **options))
    return graphs


def saved_float8(graphs: Graphs, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of float8 tensors of these shapes, either way round, that cross from forward to backward."""
    wanted = {s for shape in shapes for s in (tuple(shape), tuple(shape)[::-1])}
    return sum(t.numel() for t in graphs.saved() if t.dtype.itemsize == 1 and tuple(t.shape) in wanted)


def compile_counted(
    fn: Callable[..., Any], backend: str = "aot_eager", **options: Any
) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """fn compiled with fullgraph=True, and a counter whose `frame_count` is the number of compilations so far."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


def op_counts(graphs: Iterable[torch.fx.GraphModule]) -> collections.Counter[str]:
    """Calls of each op, by name."""
    return collections.Counter(
        str(node.target) for gm in graphs for node in gm.graph.nodes if node.op == "call_function"
    )
