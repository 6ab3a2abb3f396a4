"""What one launch of a Triton kernel moves, in bytes and in 32-byte sectors, for each of its candidate configs.

A sector is the least that a GPU's L2 cache hands out, so a block that reads every tenth element moves all of them. An
access costs its bytes times the sectors that a block touches over those that the same bytes would fill. Within a block
and one iteration of a loop all that goes through one parameter counts together: neighbours share what is in L1. Each
buffer counts once, as far as the launch reads or writes it, however often; so both figures are lower bounds.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from float8_compile.preview import inductor
from float8_compile.preview.accesses import Access, accesses
from float8_compile.preview.tiles import Pointer

SECTOR = 32  # bytes
UNKNOWN = Access("", False, None, 0, 0, 0)

_numbers = itertools.count()


@dataclass(frozen=True)
class Traffic:
    """Of one tensor in one launch, in bytes. counted: False where its bytes stand for sectors."""

    reads: int
    writes: int
    sectors: int
    counted: bool = True


class TritonKernel:
    """A kernel in Inductor's wrapping, loaded from the source that Inductor wrote."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        file = f"<kernel {next(_numbers)} of a preview>"
        # triton.jit reads the source of what it decorates through inspect, which asks linecache
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        namespace: dict[str, Any] = {"__name__": name, "__file__": file}
        exec(compile(source, file, "exec"), namespace)
        self.tuner = next(value for value in namespace.values() if isinstance(value, inductor.CachingAutotuner))
        self.configs = list(self.tuner.configs)  # Triton's, with kwargs, num_warps, num_stages; compiling drops them

    def arguments(self, args: Sequence[Any]) -> dict[str, Any]:
        """A launch's arguments by name: parameters that aren't constexpr, and what only the grid is made of."""
        names = [p.name for p in self.tuner.fn.params if not p.is_constexpr]
        return dict(zip((*names, *self.tuner.inductor_meta.get("extra_launcher_args", ())), args, strict=True))

    def traffic(self, args: Sequence[Any], config: Any) -> dict[str, Traffic]:
        """What each tensor among the arguments costs in one launch, by parameter."""
        names = dict(self.tuner.triton_meta["constants"]) | self.arguments(args) | config.kwargs
        tensors = {name: value for name, value in names.items() if isinstance(value, Tensor)}
        grid = inductor.grid(self.tuner, config, {name: v for name, v in names.items() if isinstance(v, int)})
        for name, tensor in tensors.items():
            names[name] = Pointer(name, indices=tensor.dtype in (torch.int32, torch.int64))
        found: dict[str, list[Access]] = defaultdict(list)
        for access in accesses(self.tuner.fn.__name__, self._functions, names, grid, [size // 2 for size in grid]):
            found[access.parameter].append(access)
        for name in tensors.keys() & self._mentioned - found.keys():
            found[name].append(UNKNOWN)
        programs = int(np.prod(grid))
        return {name: _traffic(tensor, found[name], programs) for name, tensor in tensors.items()}

    @cached_property
    def _functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in ast.parse(self.source).body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def _mentioned(self) -> set[str]:
        body = self._functions[self.tuner.fn.__name__].body
        return {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _traffic(tensor: Tensor, found: list[Access], programs: int) -> Traffic:
    extent, item = extent_of(tensor), tensor.dtype.itemsize
    nbytes, sectors = [0, 0], 0.0
    for access in found:
        if access.stores or not nbytes[True]:  # what a block reads back after it has written it is still in a cache
            nbytes[access.stores] += access.size * access.times * programs * item or extent
    for stores in (False, True):
        nbytes[stores] = min(nbytes[stores], extent)
        sectors += nbytes[stores] * max((_excess(group, item) for group in _iterations(found, stores)), default=1.0)
    return Traffic(nbytes[False], nbytes[True], round(sectors), all(access.offsets is not None for access in found))


def _iterations(found: list[Access], stores: bool) -> list[np.ndarray[Any, Any]]:
    """The elements that one iteration of each loop touches."""
    loops: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
    for access in found:
        if access.stores is stores and access.offsets is not None:
            loops[access.loop].append(access.offsets)
    return [np.unique(np.concatenate(offsets)) for offsets in loops.values()]


def _excess(elements: np.ndarray[Any, Any], item: int) -> float:
    """Sectors touched, over those that so many bytes would fill."""
    touched = np.unique(elements * item // SECTOR).size
    return touched / -(-elements.size * item // SECTOR) if elements.size else 1.0


def extent_of(tensor: Tensor) -> int:
    """Bytes of the elements that there are; what is broadcast is there once."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(np.prod(list(sizes), dtype=np.int64)) * tensor.dtype.itemsize
