"""What one block of a Triton kernel loads and stores, and where: the kernel's index arithmetic, in numbers.

The body of the kernel is walked statement by statement. What follows from the program's number, `tl.arange`, sizes and
the config is known. What is loaded is not, except that a loaded integer, which may become an index, stands for one
anywhere: a row that is looked up is far from the next. Of a loop one iteration in the middle is walked, of an `if`
whose condition isn't known both branches.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from float8_compile.preview import tiles
from float8_compile.preview.tiles import Pointer, Program, Unknown


@dataclass(frozen=True)
class Access:
    """One `tl.load`, `tl.store` or `tl.atomic_*`.

    parameter: what it goes through; "" where that isn't known. offsets: the elements that the block touches, flat;
    None where that isn't known. size: how many elements the tile has, masked ones included. times: how often the
    block does it, in loops; 0 where that isn't known. loop: which one, so that accesses of one iteration are told from
    later ones.
    """

    parameter: str
    stores: bool
    offsets: np.ndarray[Any, Any] | None
    size: int
    times: int
    loop: int


def accesses(
    kernel: str,
    functions: Mapping[str, ast.FunctionDef],
    arguments: Mapping[str, Any],
    grid: Sequence[int],
    program: Sequence[int],
) -> list[Access]:
    """Those of one program of a kernel.

    functions: the kernel's and those that it may call, by name. arguments: `Pointer`s and numbers, constexprs included.
    """
    walk = _Walk(functions, grid, program)
    with np.errstate(all="ignore"):
        walk.body(functions[kernel].body, dict(arguments))
    return walk.found


class _Walk:
    def __init__(self, functions: Mapping[str, ast.FunctionDef], grid: Sequence[int], program: Sequence[int]) -> None:
        self.functions, self.grid, self.program = functions, grid, program
        self.found: list[Access] = []
        self.names: dict[str, Any] = {}
        self.times, self.loop, self.loops = 1, 0, 0
        self.result: Any = None

    # Statements

    def body(self, statements: Sequence[ast.stmt], names: dict[str, Any]) -> Any:
        """What a function's body returns, called with these names."""
        before, self.names, self.result = self.names, names, None
        self.statements(statements)
        result, self.names, self.result = self.result, before, None
        return result

    def statements(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            self.assign(node.targets[0], self.value(node.value))
        elif isinstance(node, ast.AnnAssign) and node.value:
            self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, self.binary(node.op, self.value(node.target), self.value(node.value)))
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.Return):
            self.result = self.value(node.value) if node.value else None
        elif isinstance(node, ast.For):
            self.iterate(node)
        elif isinstance(node, ast.While):
            self.repeat(node.body, times=0)
        elif isinstance(node, ast.If):
            self.branch(node)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value if isinstance(value, list) else [Unknown(tiles.shape_of(value))] * len(target.elts)
            for part, each in zip(target.elts, values, strict=False):
                self.assign(part, each)

    def branch(self, node: ast.If, first: int = 0) -> None:
        condition = self.value(node.test)
        names = [name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)]
        program = next((name for name in names if isinstance(self.names.get(name), Program)), None)
        if program is None:
            if isinstance(condition, Unknown) or bool(np.all(condition)):
                self.statements(node.body)
            if isinstance(condition, Unknown) or not bool(np.all(condition)):
                self.statements(node.orelse)
            return
        # Some programs go one way and some the other. In a kernel that was combined of several, `if pid < 7: ... elif
        # pid < 9: ...`, each branch has programs of its own: one in the middle of them is walked.
        before = self.names[program]
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Lt):
            bound = self.value(node.test.comparators[0])
            if isinstance(bound, int):
                self.names[program], first = Program((first + bound) // 2), bound
        self.statements(node.body)
        self.names[program] = before
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            self.branch(node.orelse[0], first)
        else:
            self.statements(node.orelse)

    def iterate(self, node: ast.For) -> None:
        bounds = [self.value(arg) for arg in node.iter.args] if isinstance(node.iter, ast.Call) else []
        known = bool(bounds) and all(isinstance(bound, (int, np.integer)) for bound in bounds)
        turns = range(*map(int, bounds)) if known else None
        if turns is not None and not turns:
            return
        self.assign(node.target, turns[len(turns) // 2] if turns else bounds[0] if bounds[1:] else 0)
        self.repeat(node.body, times=len(turns or ()))

    def repeat(self, body: Sequence[ast.stmt], times: int) -> None:
        before = self.times, self.loop
        self.loops += 1
        self.times, self.loop = self.times * times, self.loops
        self.statements(body)
        self.times, self.loop = before

    # Expressions

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Unknown())
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.BinOp):
            return self.binary(node.op, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp):
            return tiles.apply(tiles.UNARY[type(node.op)], self.value(node.operand))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in tiles.COMPARE:
            return tiles.apply(tiles.COMPARE[type(node.ops[0])], self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            condition = self.value(node.test)
            return Unknown() if isinstance(condition, Unknown) else self.value(node.body if condition else node.orelse)
        if isinstance(node, ast.Subscript):
            return self.subscript(self.value(node.value), node.slice)
        if isinstance(node, ast.Call):
            return self.call(node)
        return Unknown()

    def binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(right, Pointer):
            left, right = right, left
        if isinstance(left, Pointer):
            return replace(left, offset=tiles.apply(tiles.BINARY[type(op)], left.offset, right))
        return tiles.apply(tiles.BINARY[type(op)], left, right)

    def subscript(self, value: Any, index: ast.expr) -> Any:
        places = index.elts if isinstance(index, ast.Tuple) else [index]
        taken = tuple(slice(None) if isinstance(place, ast.Slice) else None for place in places)
        if isinstance(value, Pointer):
            return replace(value, offset=tiles.index(value.offset, taken))
        return tiles.index(value, taken)

    def call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        short = name.rsplit(".", 1)[-1]
        if isinstance(node.func, ast.Attribute) and short == "to":
            return self.value(node.func.value)  # of an index: another integer type
        args = [self.value(arg) for arg in node.args]
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        if name in self.functions:
            parameters = (parameter.arg for parameter in self.functions[name].args.args)
            return self.body(self.functions[name].body, dict(zip(parameters, args, strict=False)) | named)
        if short in ("load", "store") or short.startswith("atomic_"):
            return self.access(short, args, named)
        if short in ("program_id", "num_programs"):
            axis = args[0] if args else named["axis"]
            return Program(self.program[axis]) if short == "program_id" else self.grid[axis]
        known = tiles.PYTHON.get(name) or tiles.TRITON.get(short)
        if known:
            try:
                return known(*args, **named)
            except (TypeError, ValueError, IndexError):
                return Unknown(tiles.broadcast(*args))
        for pointer in (arg for arg in (*args, *named.values()) if isinstance(arg, Pointer)):
            self.found.append(Access(pointer.parameter, False, None, 0, 0, self.loop))  # a block pointer, a descriptor
        return tiles.reduced(args) if short in tiles.REDUCTIONS else Unknown(tiles.broadcast(*args))

    def access(self, short: str, args: list[Any], named: dict[str, Any]) -> Any:
        pointer, stores = args[0] if args else named.get("pointer"), short != "load"
        position = {"load": 1, "atomic_cas": 3}.get(short, 2)
        mask = args[position] if len(args) > position else named.get("mask")
        if not isinstance(pointer, Pointer):
            self.found.append(Access("", stores, None, 0, 0, self.loop))
            return Unknown(tiles.shape_of(pointer))
        shape, offsets = tiles.broadcast(pointer.offset, mask), None
        if not isinstance(pointer.offset, Unknown):
            offsets = np.broadcast_to(np.asarray(pointer.offset), shape)
            if mask is not None and not isinstance(mask, Unknown):
                offsets = offsets[np.broadcast_to(np.asarray(mask, dtype=bool), shape)]
            offsets = offsets.ravel()
        size = int(np.prod(shape, dtype=np.int64))
        self.found.append(Access(pointer.parameter, stores, offsets, size, self.times, self.loop))
        if stores or not pointer.indices or isinstance(pointer.offset, Unknown):
            return Unknown(shape)
        return np.broadcast_to(_anywhere(pointer.offset), shape)


def _anywhere(address: Any) -> np.ndarray[Any, Any]:
    """Indices far from one another, the same for the same address (Knuth's multiplicative hash)."""
    return (np.asarray(address, dtype=np.int64) * 2654435761 >> 12) % 2**20
