"""Bytes in sectors: the index arithmetic of kernels as Inductor writes them, and of a few written for the purpose."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import float8_compile as f8
from float8_compile.preview.accesses import Access, accesses
from float8_compile.preview.result import Config, Launch
from float8_compile.preview.tiles import Pointer

FP32 = torch.float32


def launch_of(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = FP32
) -> tuple[Launch, tuple[Config, ...]]:
    """The only launch of a function of such inputs, and its kernel's configs."""
    result = f8.preview(lambda: (function, tuple(torch.randn(shape, dtype=dtype) for shape in shapes)))
    assert result.notes == ()
    ((launch,),) = (graph.launches for graph in result.graphs)
    return launch, result.graphs[0].kernels[launch.name].configs


# Kernels that Inductor writes


def test_a_pointwise_kernel_uses_what_it_touches() -> None:
    launch, configs = launch_of(lambda x: x + 1, (1000, 1000))
    assert (launch.reads, launch.writes, launch.sectors) == (4_000_000, 4_000_000, 8_000_000)
    assert {config.sectors for config in configs} == {8_000_000}


@pytest.mark.parametrize(("step", "dtype"), [(2, FP32), (8, FP32), (64, FP32), (8, torch.bfloat16)])
def test_every_nth_element_costs_its_sector(step: int, dtype: torch.dtype) -> None:
    """Up to 32 bytes a sector; what is read is counted without the gaps."""
    launch, _ = launch_of(lambda x: x[:, ::step] + 1, (512, 4096), dtype=dtype)
    used = 512 * 4096 // step * dtype.itemsize
    assert (launch.reads, launch.writes) == (used, used)
    assert launch.sectors == used * min(step, 32 // dtype.itemsize) + used


def test_a_transposed_copy_is_coalesced_in_tiles() -> None:
    """The best of its configs works on tiles; one works on columns, and is not chosen."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.to(torch.float8_e4m3fn)
        return y, y.t().contiguous()

    launch, configs = launch_of(both, (4096, 4096), dtype=torch.bfloat16)
    assert launch.sectors == launch.reads + launch.writes == 4 * 4096**2
    assert max(config.sectors for config in configs) > 4 * launch.sectors


def test_a_reduction_reads_all_of_it() -> None:
    launch, _ = launch_of(lambda x: x.sum(1), (8192, 4096))
    assert (launch.reads, launch.writes) == (4 * 8192 * 4096, 4 * 8192)
    assert launch.sectors == pytest.approx(launch.reads + launch.writes, rel=0.01)


def test_two_loops_over_a_row_read_it_once() -> None:
    """The second time it comes from a cache: the figure is a lower bound."""
    launch, _ = launch_of(lambda x: x.softmax(1), (8192, 20_000))
    assert (launch.reads, launch.writes) == (4 * 8192 * 20_000, 4 * 8192 * 20_000)


def test_what_is_broadcast_is_read_once() -> None:
    launch, _ = launch_of(lambda x, row, column: x + row + column, (1024, 1024), (1024,), (1024, 1))
    assert launch.reads == 4 * (1024 * 1024 + 1024 + 1024)
    assert launch.sectors == pytest.approx(launch.reads + launch.writes, rel=0.01)


def test_masked_halves_count_once_each() -> None:
    launch, _ = launch_of(lambda x, y: torch.cat([x, y], 1) * 2, (1024, 512), (1024, 512))
    assert (launch.reads, launch.writes) == (4 * 1024 * 1024, 4 * 1024 * 1024)


def test_in_place_is_read_and_written() -> None:
    launch, _ = launch_of(lambda x: x.mul_(2), (1024, 1024))
    assert (launch.reads, launch.writes, launch.sectors) == (4 * 1024**2, 4 * 1024**2, 8 * 1024**2)


@pytest.mark.parametrize(("width", "sectors"), [(8, 1), (1, 8)])
def test_rows_that_are_looked_up(width: int, sectors: int) -> None:
    """They are far from one another: a row of 32 bytes is a sector, one of 4 bytes costs one as well."""

    def build() -> Any:
        table, rows = torch.randn(100_000, width), torch.randint(100_000, (1024,))
        return (lambda table, rows: table[rows] + 1), (table, rows)

    result = f8.preview(build)
    (launch,) = result.launches
    table = next(buffer for buffer in launch.buffers if buffer.shape == (100_000, width))
    assert (table.reads, table.sectors) == (1024 * width * 4, 1024 * width * 4 * sectors)
    assert result.notes == ()


# What a walk over a kernel's body finds


def walked(source: str, **arguments: Any) -> list[Access]:
    """By program 4 of 8 of the last function in the source. `x`, `y` are pointers to data, `i` is one to integers."""
    functions = {f.name: f for f in ast.parse(textwrap.dedent(source)).body if isinstance(f, ast.FunctionDef)}
    pointers = {"x": Pointer("x"), "y": Pointer("y"), "i": Pointer("i", indices=True)}
    return accesses(list(functions)[-1], functions, pointers | arguments, grid=(8,), program=(4,))


def offsets(access: Access) -> list[int]:
    assert access.offsets is not None
    return access.offsets.tolist()


def test_a_block_in_the_middle() -> None:
    load, store = walked(
        """
        def kernel(x, y, n, BLOCK):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:]
            tl.store(y + 2 * offset, tl.load(x + offset, offset < n), offset < n)
        """,
        n=18,
        BLOCK=4,
    )
    assert (load.parameter, load.stores, offsets(load), load.size) == ("x", False, [16, 17], 4)
    assert (store.parameter, store.stores, offsets(store)) == ("y", True, [32, 34])


def test_a_loop_is_walked_in_the_middle() -> None:
    inside, after = walked(
        """
        def kernel(x, n, BLOCK):
            for start in tl.range(0, n, BLOCK):
                tl.load(x + start + tl.arange(0, BLOCK))
            tl.load(x + 1)
        """,
        n=10,
        BLOCK=2,
    )
    assert (offsets(inside), inside.times, inside.loop) == ([4, 5], 5, 1)
    assert (offsets(after), after.times, after.loop) == ([1], 1, 0)


def test_loops_that_are_empty_or_of_unknown_length() -> None:
    first, second = walked(
        """
        def kernel(x, y):
            for _ in range(0, 0):
                tl.load(x)
            for _ in range(0, tl.load(y).to(tl.int32)):
                tl.store(x, 1)
            while True:
                tl.store(x + 1, 1)
        """
    )[1:]
    assert [(a.parameter, a.stores, a.times, a.loop) for a in (first, second)] == [("x", True, 0, 1), ("x", True, 0, 2)]


def test_tiles_of_two_dimensions() -> None:
    (load,) = walked(
        """
        def kernel(x):
            rows = tl.arange(0, 2)[:, None]
            columns = tl.arange(0, 3)[None, :]
            rows += 1
            first, second = rows * 10, columns
            tl.load(x + (first + second), (columns < 2) & (rows < 9), other=0.0).to(tl.float32)
        """
    )
    assert (offsets(load), load.size) == ([10, 11, 20, 21], 6)


def test_what_is_loaded_is_unknown_unless_it_is_an_index() -> None:
    known, through_data, index, through_index = walked(
        """
        def kernel(x, y, i):
            data = tl.load(x + tl.arange(0, 64))
            tl.store(y + data, data)
            index = tl.load(i + tl.arange(0, 64) // 2)
            tl.load(y + index)
        """
    )
    assert known.offsets is not None
    assert (through_data.offsets, through_data.size) == (None, 64)
    assert index.offsets is not None
    distinct = np.unique(offsets(through_index))
    assert len(distinct) == 32, "the same index at the same place"
    assert np.diff(distinct).min() > 8, "and others far away"


def test_conditions() -> None:
    """Known ones choose; those on data, and on the program's number, go both ways."""
    found = walked(
        """
        def kernel(x, y, FLAG, n):
            if FLAG:
                tl.load(x + 1)
            else:
                tl.load(x + 2)
            if tl.load(y) > 0:
                tl.load(x + 3)
            pid = tl.program_id(0)
            if pid < n:
                tl.load(x + 100 * pid)
            elif pid < n + 6:
                tl.load(x + 100 * (pid - n))
            tl.load(x + (7 if FLAG else 8))
        """,
        FLAG=False,
        n=2,
    )
    assert [offsets(access)[0] for access in found if access.parameter == "x"] == [2, 3, 100, 300, 8]


def test_functions_of_the_kernels_own() -> None:
    (load,) = walked(
        """
        def place(pointer, row, stride=1):
            return pointer + row * stride

        def kernel(x):
            tl.load(place(x, tl.cdiv(7, 2), stride=10))
        """
    )
    assert offsets(load) == [40]


def test_a_pointer_that_is_handed_on_is_unknown() -> None:
    found = walked(
        """
        def kernel(x, y):
            block = tl.make_block_ptr(x, (8,), (1,), (0,), (8,), (0,))
            tl.store(y, tl.load(block))
        """
    )
    assert [(a.parameter, a.offsets is None) for a in found] == [("x", True), ("", True), ("y", False)]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("min(n, 3)", 3),
        ("max(n, 3)", 5),
        ("tl.minimum(n, tl.full([1], 3, tl.int32))", 3),
        ("tl.where(n > 3, 1, 2)", 1),
        ("triton_helpers.div_floor_integer(n, 2)", 2),
        ("triton_helpers.remainder_integer(n, 2)", 1),
        ("tl.broadcast_to(n, [1, 1])", 5),
        ("tl.reshape(tl.arange(0, 4), [2, 2])[:, None] * 0 + n", 5),
        ("-(-n)", 5),
        ("n << 1", 10),
        ("tl.num_programs(0)", 8),
        ("tl.multiple_of(n, 8)", 5),
    ],
)
def test_index_arithmetic(expression: str, value: int) -> None:
    (load,) = walked(f"def kernel(x, n):\n    tl.load(x + ({expression}))", n=5)
    assert offsets(load)[0] == value


@pytest.mark.parametrize(
    "expression", ["n // 0", "tl.exp(n)", "tl.sum(tl.arange(0, 4), 0)", "nothing", "n[0, 1].thing"]
)
def test_what_cant_be_computed_is_unknown(expression: str) -> None:
    (load,) = walked(f"def kernel(x, n):\n    tl.load(x + ({expression}))", n=5)
    assert load.offsets is None
