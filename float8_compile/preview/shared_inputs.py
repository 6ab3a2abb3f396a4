"""Layers that multiply the same tensor, each with a cast of its own: with one scale between them, one cast would do.

Read from the post-grad graph's text, since the launches don't tell which of the tensors they write are casts of one.
From each forward GEMM's left operand the way back goes over layouts, the conversion to float8, saturation and the one
product with the scale; what is behind these is the tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from float8_compile.preview.result import Graph
from float8_compile.preview.roles import is_float8_gemm

_NODE = re.compile(r'^ *(\w+): "[^"]*" = torch\.ops\.\w+\.(\w+)\.\w+\(([^)]*)', re.MULTILINE)
_CONVERSION = {"convert_element_type", "_to_copy"}
_LAYOUT = {"view", "reshape", "permute", "t", "transpose", "clone"}
_AFTER_SCALING = {"clamp", "clamp_min", "clamp_max", "where", "as_strided", "mul"}


@dataclass(frozen=True)
class SharedInput:
    """layers: those that read one tensor. casts: how many of it there are. nbytes: of one of them."""

    layers: tuple[str, ...]
    casts: int
    nbytes: int


def shared_inputs(graph: Graph) -> list[SharedInput]:
    """Of a forward graph, those with more than one cast."""
    nodes = {name: (operator, arguments.split(", ")) for name, operator, arguments in _NODE.findall(graph.fx)}
    readers: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for launch in graph.launches:
        gemm = next((nodes[name] for name in launch.nodes if name in nodes and nodes[name][0] == "_scaled_mm"), None)
        if gemm and is_float8_gemm(launch) and len(launch.layers) == 1:
            cast, source = _followed(nodes, gemm[1][0])
            if source:
                readers[source].append((launch.layers[0], cast, launch.buffers[0].reads))
    found = [
        SharedInput(tuple(dict.fromkeys(layer for layer, _, _ in uses)), len({cast for _, cast, _ in uses}), uses[0][2])
        for uses in readers.values()
    ]
    return [shared for shared in found if shared.casts > 1]


def _followed(nodes: dict[str, tuple[str, list[str]]], operand: str) -> tuple[str, str]:
    """The float8 tensor that the operand is a view of, and what was scaled and cast for it; "" if that isn't seen."""
    cast, name, scaled = "", operand, False
    while name in nodes:
        operator, arguments = nodes[name]
        # Under a delayed scale a tensor's infinities become NaN: `x * scale + (x - x)`.
        is_guard = operator == "add" and nodes.get(arguments[1], ("", []))[0] == "sub"
        if operator in _CONVERSION and not cast:
            cast = name
        elif not (operator in _CONVERSION | _LAYOUT or is_guard or (operator in _AFTER_SCALING and not scaled)):
            break
        scaled |= operator == "mul"
        name = arguments[2 if operator == "where" else 0]  # the one that is passed on
    return cast, name if scaled else ""
