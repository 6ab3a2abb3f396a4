"""Arithmetic of a Triton kernel's tiles where not all of them are known: what its indices are computed with.

A tile is a numpy array, a number, or `Unknown`, of which only the shape is known. What is computed from an unknown tile
is unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Unknown:
    """A tile (or number) of which only the shape is known."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pointer:
    """Where a parameter points, plus an offset in elements. indices: whether integers are there."""

    parameter: str
    offset: Any = 0
    indices: bool = False


class Program(int):
    """A program's number, as long as nothing is computed from it."""


BINARY: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[..., Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip

# What index arithmetic calls: Python's of numbers; `tl`'s, and Inductor's triton_helpers, by their last name.
PYTHON: dict[str, Callable[..., Any]] = {
    "min": lambda *args: apply(min, *args),
    "max": lambda *args: apply(max, *args),
    "int": lambda x: x,
}
TRITON: dict[str, Callable[..., Any]] = {
    "arange": lambda start, end: np.arange(start, end, dtype=np.int64),
    "full": lambda shape, value, dtype=None: _shaped(np.broadcast_to, value, [shape]),
    "zeros": lambda shape, dtype=None: np.zeros(shape, dtype=np.int64),
    "broadcast_to": lambda x, *shape: _shaped(np.broadcast_to, x, shape),
    "reshape": lambda x, *shape: _shaped(np.reshape, x, shape),
    "where": lambda condition, a, b: apply(np.where, condition, a, b),
    "minimum": lambda a, b, **_: apply(np.minimum, a, b),
    "maximum": lambda a, b, **_: apply(np.maximum, a, b),
    "cdiv": lambda a, b: apply(lambda x, y: -(-x // y), a, b),
    "div_floor_integer": lambda a, b: apply(operator.floordiv, a, b),
    "remainder_integer": lambda a, b: apply(operator.mod, a, b),
    "multiple_of": lambda x, *_: x,
    "max_contiguous": lambda x, *_: x,
}
REDUCTIONS = {"sum", "max", "min", "max2", "min2", "any", "prod", "reduce", "argmax", "argmin", "xor_sum"}


def apply(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` where all are known and it can be computed, else an unknown tile."""
    if all(isinstance(arg, (np.ndarray, np.generic, int, float)) for arg in args):
        try:
            return function(*args)
        except (TypeError, ValueError, ArithmeticError):
            pass
    return Unknown(broadcast(*args))


def _shaped(function: Callable[..., Any], x: Any, shape: Sequence[Any]) -> Any:
    sizes = tuple(shape[0]) if shape and isinstance(shape[0], list) else tuple(shape)
    return Unknown(sizes) if isinstance(x, Unknown) else function(x, sizes)


def index(value: Any, taken: tuple[Any, ...]) -> Any:
    """`value[:, None]` and the like; a number stays one."""
    if len(shape_of(value)) != taken.count(slice(None)):
        return value
    if isinstance(value, Unknown):
        return Unknown(np.broadcast_to(0, value.shape)[taken].shape)
    return np.asarray(value)[taken]


def reduced(args: list[Any]) -> Unknown:
    """`tl.sum(x, axis)` and the like."""
    shape = list(shape_of(args[0])) if args else []
    axis = args[1] if len(args) > 1 and isinstance(args[1], int) else None
    return Unknown(tuple(shape[:axis] + shape[axis + 1 :])) if axis is not None else Unknown()


def shape_of(value: Any) -> tuple[int, ...]:
    """() for a number, and for what isn't a tile."""
    if isinstance(value, Pointer):
        return shape_of(value.offset)
    return value.shape if isinstance(value, (Unknown, np.ndarray)) else ()


def broadcast(*values: Any) -> tuple[int, ...]:
    """The shape that tiles have together, () if none."""
    try:
        return np.broadcast_shapes(*map(shape_of, values))
    except ValueError:
        return ()
