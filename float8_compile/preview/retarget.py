"""The same graph and the same fake tensors, on another device.

meta    what build() makes and the user's code sees: no memory
cpu     what AOTAutograd traces: C++ autograd refuses fake CUDA tensors where there is no CUDA device, and
        Inductor's joint-graph passes drop all computation on meta tensors
cuda    what Inductor generates code for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from float8_compile.preview.inductor import FakeTensorMode, tree_map

META, CPU, CUDA = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)


class Move:
    """Fake tensors to another device, each once; what shares memory goes on sharing it, a view stays one."""

    def __init__(self, device: torch.device, mode: FakeTensorMode, *, gradients: bool) -> None:
        self.device, self.mode, self.gradients = device, mode, gradients
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}  # the first one is there so that its id stays taken
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, x: Any) -> Any:
        """x on the device if it is a tensor, the device if it is one, else x itself."""
        if isinstance(x, torch.device):
            return self.device
        if not isinstance(x, Tensor) or x.device == self.device:
            return x
        if id(x) not in self.moved:
            with self.mode, torch.no_grad():
                self.moved[id(x)] = x, self._move(x)
        return self.moved[id(x)][1]

    def _move(self, x: Tensor) -> Tensor:
        if hasattr(x, "__tensor_flatten__"):
            names, context = x.__tensor_flatten__()
            parts = {name: self(getattr(x, name)) for name in names}
            subclass: Any = type(x)
            return subclass.__tensor_unflatten__(parts, context, x.size(), x.stride())
        if x._is_view() and x._base is not None:
            base = self(x._base)
            same = base if base.dtype == x.dtype else base.view(x.dtype)
            new = same.as_strided(x.size(), x.stride(), x.storage_offset())
        else:
            new = torch.empty(0, dtype=x.dtype, device=self.device)
            new.set_(self._storage(x.untyped_storage()), x.storage_offset(), x.size(), x.stride())
        if not self.gradients:
            return new
        if isinstance(x, nn.Parameter):
            return nn.Parameter(new, x.requires_grad)
        new.requires_grad_(x.requires_grad)
        if not x.is_leaf:
            with torch.enable_grad():
                new = new.clone()
        return new

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage._cdata not in self.storages:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
            self.storages[storage._cdata] = memory.untyped_storage()
        return self.storages[storage._cdata]


def move_graph(gm: fx.GraphModule, move: Move) -> None:
    """In place, subgraphs too: every device among the arguments, and every fake tensor that describes a node."""
    for graph in graphs(gm):
        for node in graph.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda x: move(x) if isinstance(x, torch.device) else x)
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda x: move(x) if isinstance(x, torch.device) else x)
            for key in ("val", "example_value"):
                if key in node.meta:
                    node.meta[key] = tree_map(move, node.meta[key])
        graph.recompile()


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and its subgraphs: checkpointed regions, branches, loops."""
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def results_on_meta(gm: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """What stands in for the compiled graph when the user's code runs: its results, without values, on meta."""
    inputs = {node: position for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    outputs: Any = gm.graph.output_node().args[0]
    described = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in outputs]

    def run(args: list[Any]) -> list[Any]:
        results = [
            args[inputs[node]] if node in inputs else _empty(value)
            for node, value in zip(outputs, described, strict=True)
        ]
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes one list, which the callee empties
    return run


def _empty(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return value
