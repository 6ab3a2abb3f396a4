"""Which of the model's modules a node of a graph belongs to, and what a forward graph keeps for its backward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from float8_compile.convert import WRAPPER_NAMES
from float8_compile.preview.result import Saved
from float8_compile.preview.sectors import extent_of

aten = torch.ops.aten


class Layers:
    """The names of the modules under `function`, which is one, or a function that has them in its closure."""

    def __init__(self, function: Any) -> None:
        roots = {"": function} if isinstance(function, nn.Module) else _in_closure(function)
        prefixes = {name: f"{name}." for name in roots} if len(roots) > 1 else dict.fromkeys(roots, "")
        self.names = {
            id(module): _clean(prefixes[root] + name)
            for root, model in reversed(roots.items())
            for name, module in model.named_modules()
        }

    def of(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        """The innermost modules in which the nodes ran, or whose gradients they compute; each once, in order."""
        return tuple(dict.fromkeys(self._innermost(node) for node in nodes))

    def _innermost(self, node: fx.Node) -> str:
        stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack")
        if not stack:
            return ""
        key, (path, *_) = next(reversed(stack.items()))
        identity = key.split("@")[0]  # a second call of a module is "<id>@1"
        if identity.isdigit() and int(identity) in self.names:
            return self.names[int(identity)]
        return re.sub(r"\w\['(\w+)'\]", r"\1", path)  # L['model'].layers.0, as Dynamo saw it


def _in_closure(function: Any) -> dict[str, nn.Module]:
    """The modules that a function, or the module that a method, has at hand, by the names of its variables."""
    if isinstance(owner := getattr(function, "__self__", None), nn.Module):
        return {"": owner}
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return {name: value for name, value in variables.items() if isinstance(value, nn.Module)}


def _clean(name: str) -> str:
    """Without what torch.compile, FSDP1 and activation checkpointing put into names."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPER_NAMES)


def saved_for_backward(forward: fx.GraphModule, backward: fx.GraphModule, layers: Layers) -> tuple[Saved, ...]:
    """Results of the forward graph that are the backward graph's inputs. What is a view of an input is not kept."""
    readers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results: Any = forward.graph.output_node().args[0]
    saved = []
    for node in dict.fromkeys(node for node in results if isinstance(node, fx.Node) and node.name in readers):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not _is_input(node):
            users = layers.of(readers[node.name].users)
            saved.append(Saved(node.name, tuple(value.shape), name_of(value.dtype), extent_of(value), users))
    return tuple(saved)


def _is_input(node: fx.Node) -> bool:
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def is_layout(node: fx.Node) -> bool:
    """Whether a node computes nothing: a view, or a shape that may need a copy."""
    return getattr(node.target, "is_view", False) or node.target in (aten._unsafe_view.default, aten.reshape.default)


def name_of(dtype: Any) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
