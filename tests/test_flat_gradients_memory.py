"""FlatGradients need little more than their buffer: four microbatches of four 1024 x 1024 bfloat16 layers, accumulated
in float32, against a list of float32 gradients and its concatenation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_checks import backward
from torch import Tensor, nn

import float8_compile as f8
from benchmarks.allocations import Memory, mark, memory_of, nbytes

LAYERS, SIZE, TOKENS, MICROBATCHES = 4, 1024, 16, 4
BUFFER = LAYERS * SIZE * SIZE * 4
BOUND = 1.45  # of the buffer: one layer's gradient and one layer's casts in float32 beside it

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, SIZE, generator=generator).bfloat16() for _ in range(MICROBATCHES)]


DATA = batches()


def built(recipe: str) -> nn.Sequential:
    """In its steady state, and the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))).bfloat16()
    f8.convert_to_float8_training(model, config=recipe)
    if recipe == "delayed":
        with f8.calibrate(model):
            backward(model, DATA[0])
        model.zero_grad()
    return model


def in_the_buffer(recipe: str, backend: str | None) -> tuple[float, f8.FlatGradients]:
    """The peak of a step's microbatches, in buffers and with the buffer; and the gradients."""
    model = built(recipe)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    gradients = f8.FlatGradients(model.parameters())
    assert nbytes(gradients.flat) == BUFFER
    backward(run, DATA[0])  # compiles
    gradients.zero_()
    peak = memory_of(lambda: [backward(run, x) for x in DATA]).peak
    return 1 + peak / BUFFER, gradients


def in_a_list(recipe: str) -> tuple[float, Tensor]:
    """The peak of the same with a list and its concatenation, in buffers; and that."""
    model, flat = built(recipe), []

    def step() -> None:
        sums = [torch.zeros(p.shape) for p in model.parameters()]
        for x in DATA:
            backward(model, x)
            for parameter, total in zip(model.parameters(), sums, strict=True):
                assert parameter.grad is not None
                total += parameter.grad
                parameter.grad = None
        flat.append(torch.cat([total.flatten() for total in sums]))

    return memory_of(step).peak / BUFFER, flat[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "delayed"])
def test_eagerly_the_peak_is_little_above_the_buffer_and_a_list_takes_two(recipe: str) -> None:
    peak, gradients = in_the_buffer(recipe, backend=None)
    list_peak, expected = in_a_list(recipe)
    assert peak <= BOUND
    assert list_peak >= 2
    assert torch.equal(gradients.flat, expected)


@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_compiled_the_peak_is_little_above_the_buffer(recipe: str) -> None:
    """One layer's gradient is alive at a time also in the one graph of a compiled backward."""
    peak, _ = in_the_buffer(recipe, backend="inductor")
    assert peak <= BOUND


def test_eagerly_a_product_with_scales_per_row_takes_more_but_less_than_a_list() -> None:
    """1.95 buffers against 2.26. The weight's gradient is scaled row by column after the GEMM: the scales' outer
    product and the scaled product are float32 matrices of its size, a quarter of the buffer each. Compiled code scales
    element by element."""
    peak, gradients = in_the_buffer("rowwise", backend=None)
    list_peak, expected = in_a_list("rowwise")
    assert BOUND < peak <= 2.0 < list_peak
    assert torch.equal(gradients.flat, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_copies_gradients_only_into_another_dtype_and_only_for_its_time(dtype: torch.dtype) -> None:
    model = built("tensorwise").to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    gradients = f8.FlatGradients(model.parameters())
    gradients.attach(optimizer)
    backward(model, DATA[0].to(dtype))
    memory = memory_of(optimizer.step)
    assert memory.peak == (nbytes(*model.parameters()) if dtype is torch.bfloat16 else 0)
    assert memory.alive == 0


# What the measure sees

RUNS: dict[str, tuple[Callable[[], Any], Memory]] = {
    "nothing": (lambda: None, Memory(0, 0, [])),
    "what is returned is alive": (lambda: torch.empty(100), Memory(400, 400, [])),
    "what is not, is a peak": (lambda: torch.empty(100).numel(), Memory(400, 0, [])),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_measure_is_exact(name: str) -> None:
    run, expected = RUNS[name]
    assert memory_of(run) == expected


def test_the_measure_ignores_what_was_there_before() -> None:
    there = {"before": torch.empty(100)}
    assert memory_of(lambda: there.update(during=torch.empty(10))) == Memory(40, 40, [])
    assert memory_of(lambda: (there.pop("before").shape, there.pop("during").shape)) == Memory(0, 0, [])


def test_the_measure_knows_each_moment() -> None:
    def run() -> None:
        for count in (1, 3, 2):
            kept = torch.empty(count)
            mark("with it")
            del kept
            mark("without it")

    memory = memory_of(run)
    assert memory.at("with it") == [4, 12, 8]
    assert memory.at("without it") == [0, 0, 0]


def test_the_measure_leaves_out_what_a_cpu_takes_for_a_float8_gemm() -> None:
    """But not its result."""
    a, one = torch.ones(64, 64).to(torch.float8_e4m3fn), torch.ones(())

    def run() -> Tensor:
        return torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.float32)

    assert memory_of(lambda: [run(), torch.empty(1)]) == Memory(64 * 64 * 4 + 4, 64 * 64 * 4 + 4, [])
