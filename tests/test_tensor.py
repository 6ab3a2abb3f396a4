"""Float8Tensor: two plain tensors that travel together, also through a compiler, a file and a copy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import graphs_of
from fresh_process import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import E4M3, E5M2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from float8_compile import Cast, Float8Tensor, gemm
from float8_compile.cast import cast

ROW, TENSOR = Cast(E4M3, granularity="row"), Cast(E4M3)
every_granularity = pytest.mark.parametrize("how", [TENSOR, ROW], ids=["tensor", "row"])


def example(how: Cast = TENSOR, shape: tuple[int, ...] = (4, 6), axis: int = -1) -> Float8Tensor:
    torch.manual_seed(0)
    t = cast(torch.randn(shape, dtype=torch.bfloat16), how, axis)
    assert isinstance(t, Float8Tensor)
    return t


def equal(a: Tensor, b: Tensor) -> bool:
    """The same payload, scale and dtype."""
    assert isinstance(a, Float8Tensor)
    assert isinstance(b, Float8Tensor)
    payloads = a.payload.view(torch.uint8), b.payload.view(torch.uint8)
    return a.dtype == b.dtype and torch.equal(*payloads) and torch.equal(a.scale, b.scale)


# What it is


@every_granularity
def test_it_is_what_it_was_cast_from_but_for_the_bits(how: Cast) -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    t = cast(x, how)
    assert (t.shape, t.dtype, t.device, t.stride()) == (x.shape, x.dtype, x.device, x.stride())
    assert not t.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_divides_in_float32(dtype: torch.dtype) -> None:
    payload, scale = torch.tensor([[1.0, -3.5], [0.0, 448.0]]).to(E4M3), torch.tensor([[3.0], [7.0]])
    back = Float8Tensor(payload, scale, dtype).dequantize()
    assert type(back) is Tensor
    assert back.dtype is dtype
    assert torch.equal(back, torch.tensor([[1 / 3, -3.5 / 3], [0.0, 64.0]]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_dequantize_saturates_at_the_largest_number_of_its_dtype(dtype: torch.dtype, sign: int) -> None:
    """Float8 may round the largest number up to a power of two, which its dtype doesn't have."""
    x = torch.tensor([sign * torch.finfo(dtype).max], dtype=dtype)
    assert torch.equal(cast(x, Cast(E4M3, power_of_two=True)).dequantize(), x)


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (
            Float8Tensor(torch.ones(2, 3).to(E4M3), torch.tensor(448.0), torch.bfloat16),
            "Float8Tensor((2, 3), float8_e4m3fn, scale=448, for torch.bfloat16, cpu)",
        ),
        (
            Float8Tensor(torch.ones(2, 3).to(E5M2), torch.ones(2, 1), torch.float32),
            "Float8Tensor((2, 3), float8_e5m2, scale=(2, 1), for torch.float32, cpu)",
        ),
        (
            Float8Tensor(torch.ones(2, 3, device="meta").to(E4M3), torch.ones((), device="meta"), torch.float16),
            "Float8Tensor((2, 3), float8_e4m3fn, scale=(), for torch.float16, meta)",
        ),
    ],
    ids=["scalar", "row", "meta"],
)
def test_it_reads_well(t: Float8Tensor, text: str) -> None:
    assert repr(t) == str(t) == text


def test_a_fake_one_reads_well_too() -> None:
    with FakeTensorMode():
        t = cast(torch.randn(2, 3), TENSOR)
        assert repr(t) == "Float8Tensor((2, 3), float8_e4m3fn, scale=(), for torch.float32, cpu)"


# Taken apart and put together


@every_granularity
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), transposed=st.booleans())
@settings(deadline=None, max_examples=30)
def test_flattened_and_unflattened_it_is_the_same(how: Cast, shape: tuple[int, ...], transposed: bool) -> None:
    t = example(how, shape)
    if transposed:
        t = t.transpose(0, -1)
    assert is_traceable_wrapper_subclass(t)
    names, context = t.__tensor_flatten__()
    assert all(type(getattr(t, name)) is Tensor for name in names)
    again = Float8Tensor.__tensor_unflatten__({n: getattr(t, n) for n in names}, context, t.shape, t.stride())
    assert equal(again, t)
    assert (again.shape, again.stride(), again.storage_offset()) == (t.shape, t.stride(), t.storage_offset())


def returns_one(x: Tensor) -> Tensor:
    return cast(x * 2, ROW)


def takes_one(t: Tensor) -> Tensor:
    return gemm.output(t, t, torch.bfloat16)


def breaks_the_graph(x: Tensor) -> Tensor:
    t = cast(x * 2, ROW)
    torch._dynamo.graph_break()
    return gemm.output(t, t, torch.bfloat16)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_crosses_the_border_of_a_compiled_function(backend: str) -> None:
    """Scenario 33: a function that returns one, takes one, or breaks the graph between cast and GEMM."""
    torch._dynamo.reset()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    t = returns_one(x)
    expected = takes_one(t)
    assert equal(torch.compile(returns_one, backend=backend, fullgraph=True)(x), t)
    assert torch.equal(torch.compile(takes_one, backend=backend, fullgraph=True)(t), expected)
    assert torch.equal(torch.compile(breaks_the_graph, backend=backend)(x), expected)


def test_made_and_used_in_one_graph_it_leaves_no_trace() -> None:
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    graphs = graphs_of(lambda f: f(x), lambda x: takes_one(returns_one(x)))
    (graph,) = graphs.forward
    assert all(type(node.meta.get("val", x)).__name__ in ("Tensor", "FakeTensor") for node in graph.graph.nodes)
    assert graphs.calls("_scaled_mm") == (1, 0)


# Ops

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "transpose": lambda t: t.transpose(0, 1),
    "view": lambda t: t.view(2, 2, 6),
    "view with -1": lambda t: t.view(-1, 6),
    "reshape": lambda t: t.reshape(1, 4, 6),
    "reshape of what is no view": lambda t: t.view(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "to its own dtype": lambda t: t.to(torch.bfloat16),
    "to its device": lambda t: t.to("cpu"),
    "to a copy": lambda t: t.to(torch.bfloat16, copy=True),
}


@every_granularity
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_op_that_moves_numbers_gives_a_float8_tensor(how: Cast, op: Callable[[Tensor], Tensor]) -> None:
    t = example(how)
    result, expected = op(t), op(t.dequantize())
    assert isinstance(result, Float8Tensor)
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(result.dequantize(), expected)


def test_a_view_is_a_view_and_a_clone_is_none() -> None:
    t = example(ROW)
    for op in ("t", "transpose", "view", "detach"):
        assert OPS[op](t).payload.data_ptr() == t.payload.data_ptr()
    for op in ("clone", "to a copy"):
        assert OPS[op](t).payload.data_ptr() != t.payload.data_ptr()
        assert OPS[op](t).scale.data_ptr() != t.scale.data_ptr()


@every_granularity
def test_another_dtype_is_a_plain_tensor(how: Cast) -> None:
    t = example(how)
    assert type(t.float()) is Tensor
    assert torch.equal(t.float(), t.dequantize().float())
    assert t.to(torch.float16).dtype is torch.float16


def test_it_moves_to_another_device_whole() -> None:
    t = example(ROW).to("meta")
    assert isinstance(t, Float8Tensor)
    assert {t.device.type, t.payload.device.type, t.scale.device.type} == {"meta"}


def test_leading_dimensions_are_flattened_rows_and_all() -> None:
    t = example(ROW, (2, 3, 6))
    flat = t.reshape(-1, 6)
    assert (flat.shape, flat.scale.shape) == ((6, 6), (6, 1))
    assert torch.equal(flat.dequantize(), t.dequantize().reshape(-1, 6))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda t: t + 1, "aten.add.Tensor"),
        (lambda t: t @ t.t(), "aten.mm.default"),
        (lambda t: t.sum(), "aten.sum.default"),
        (lambda t: t.mul_(2), "aten.mul_.Tensor"),
        (lambda t: torch.cat([t, t]), "aten.cat.default"),
        (lambda t: t[0], "aten.select.int"),
    ],
)
def test_an_unsupported_op_says_its_name_and_what_to_do(op: Callable[[Tensor], Tensor], name: str) -> None:
    message = rf"^{name} is not defined for a Float8Tensor: call \.dequantize\(\) first, or work on \.payload and"
    with pytest.raises(NotImplementedError, match=message) as error:
        op(example())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("shape", "axis", "view"),
    [((4, 6), -1, (2, 12)), ((4, 6), -1, (8, 3)), ((4, 6), -1, (24,)), ((4, 6), 0, (2, 2, 6)), ((2, 3, 4), 0, (6, 4))],
)
def test_rows_that_share_a_scale_stay_whole(shape: tuple[int, ...], axis: int, view: tuple[int, ...]) -> None:
    t = example(ROW, shape, axis)
    message = r"with a scale per row can only be viewed so that its rows stay whole; call \.dequantize\(\) first"
    with pytest.raises(NotImplementedError, match=message):
        t.view(view)
    assert t.dequantize().view(view).shape == view


@every_granularity
def test_a_view_of_its_own_shape_is_always_possible(how: Cast) -> None:
    for axis in (0, -1):
        t = example(how, axis=axis)
        assert equal(t.view(4, 6), t)


# Copies and files


def through_a_file(t: Tensor) -> Tensor:
    """By pickle, as torch does it: `pickle.dumps` alone can't take any float8 tensor of torch 2.13."""
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_granularity
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_a_file])
def test_a_copy_is_equal(how: Cast, copied: Callable[[Any], Any]) -> None:
    t = example(how)
    assert equal(copied(t), t)


def test_a_deep_copy_shares_nothing() -> None:
    t = example(ROW)
    c = copy.deepcopy(t)
    assert c.payload.data_ptr() != t.payload.data_ptr()
    assert c.scale.data_ptr() != t.scale.data_ptr()


def test_a_file_is_read_by_weights_only_where_only_float8_compile_is_imported(tmp_path: Path) -> None:
    saved = {"tensor": example(TENSOR), "row": example(ROW), "plain": example().dequantize()}
    torch.save(saved, tmp_path / "file.pt")
    printed = run_python(
        """
        import float8_compile, sys
        import torch

        loaded = torch.load(sys.argv[1], weights_only=True)
        for name, t in loaded.items():
            print(name, t if name != "plain" else type(t).__name__)
        torch.save({name: t for name, t in loaded.items()}, sys.argv[1])
        """,
        str(tmp_path / "file.pt"),
        blocked=("torchao", "triton"),
    )
    assert printed.splitlines() == [f"tensor {saved['tensor']}", f"row {saved['row']}", "plain Tensor"]
    back = torch.load(tmp_path / "file.pt", weights_only=True)
    assert all(equal(back[name], saved[name]) for name in ("tensor", "row"))


def test_without_float8_compile_the_file_is_refused(tmp_path: Path) -> None:
    """Which shows that reading it does depend on the import."""
    torch.save(example(), tmp_path / "file.pt")
    with pytest.raises(AssertionError, match="Unsupported global: GLOBAL float8_compile"):
        run_python(
            "import torch, sys; torch.load(sys.argv[1], weights_only=True)",
            str(tmp_path / "file.pt"),
            blocked=("float8_compile",),
        )
