"""What Inductor would generate for a GPU, without one: launches and bytes counted by hand, and nothing left behind.

Most models are small, so each preview takes a second or less. The model of many tests is an MLP of M = 64 tokens,
K = N = 128 and 512 in between, in bfloat16:

    x (64, 128) -> "0" Linear(128, 512) -> "1" ReLU -> "2" Linear(512, 128)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import user_kernels
from fresh_process import run_python
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8_compile as f8
from float8_compile.preview import TARGETS
from float8_compile.preview.result import Graph, Preview

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import llama

BF16, FP32 = torch.bfloat16, torch.float32
M, K, HIDDEN = 64, 128, 512
X, W, H = M * K, K * HIDDEN, M * HIDDEN  # elements of the input, of each weight, of what is between the layers


def batch(*shape: int, dtype: torch.dtype = BF16, requires_grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (M, K)), dtype=dtype, requires_grad=requires_grad)


def mlp(convert: Callable[[nn.Module], object] = lambda _: None) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(K, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, K, bias=False)).bfloat16()
    convert(model)
    return model, batch()


def of(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Preview:
    """The preview of a function of such inputs, which require no gradient."""
    options = {"dtype": BF16} | options
    return f8.preview(lambda: (function, tuple(torch.randn(shape, **options) for shape in shapes)))


@functools.cache
def previewed(target: str = "H100") -> Preview:
    return f8.preview(mlp, target)


def names(graph: Graph) -> list[str]:
    """ "triton" for each Triton kernel, else the op."""
    return ["triton" if launch.kind == "triton" else launch.name for launch in graph.launches]


# Counted by hand


def test_an_mlp() -> None:
    """Forward: two GEMMs and a ReLU. Backward: four GEMMs and the ReLU's backward."""
    forward, backward = previewed().graphs
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert names(forward) == ["aten.mm", "triton", "aten.mm"]
    assert sorted(names(backward)) == [*["aten.mm"] * 4, "triton"]
    first, relu, second = forward.launches
    assert (first.reads, first.writes) == (2 * (X + W), 2 * H)
    assert (relu.reads, relu.writes, relu.sectors) == (2 * H, 2 * H, 4 * H)
    assert (second.reads, second.writes, second.flops) == (2 * (H + W), 2 * X, 2 * M * HIDDEN * K)


def test_which_layers_a_launch_serves() -> None:
    forward, backward = previewed().graphs
    assert [launch.layers for launch in forward.launches] == [("0",), ("1",), ("2",)]
    served = {name: [la.kind for la in backward.launches if name in la.layers] for name in ("0", "1", "2")}
    assert served == {"0": ["extern", "extern"], "1": ["triton"], "2": ["extern", "extern"]}


def test_what_a_launch_is_made_of() -> None:
    relu = previewed().graphs[0].launches[1]
    assert relu.ops == ("aten.relu.default",)
    assert all(f"{node}:" in previewed().graphs[0].fx for node in relu.nodes)
    assert relu.dtypes == "bfloat16 -> bfloat16"
    assert relu.name in previewed().graphs[0].kernels
    assert f"{relu.name}.run(" in previewed().graphs[0].code


def test_what_forward_keeps() -> None:
    """The hidden layer's activation, once; weights and x are alive anyway."""
    forward, backward = previewed().graphs
    assert [(s.shape, s.dtype, s.nbytes) for s in forward.saved] == [((M, HIDDEN), "bfloat16", 2 * H)]
    assert set(forward.saved[0].layers) == {"1", "2"}
    assert backward.saved == ()


def test_who_wrote_what_is_read() -> None:
    """`Buffer.tensor` joins a graph's launches, and a backward graph's inputs with what forward kept."""
    forward, backward = previewed().graphs
    first, relu, second = forward.launches
    written = {buffer.tensor for buffer in first.buffers if buffer.writes}
    assert written == {buffer.tensor for buffer in relu.buffers if buffer.reads}
    assert "" not in written
    assert {buffer.tensor for buffer in relu.buffers if buffer.writes} & {b.tensor for b in second.buffers if b.reads}
    assert forward.saved[0].name in {buffer.tensor for launch in backward.launches for buffer in launch.buffers}


def test_totals() -> None:
    result = previewed()
    assert result.launches == result.graphs[0].launches + result.graphs[1].launches
    assert result.total("extern").count == 6
    assert result.total("triton").nbytes == sum(la.reads + la.writes for la in result.launches if la.kind == "triton")
    assert result.total().seconds == pytest.approx(sum(graph.total().seconds for graph in result.graphs))
    with pytest.raises(ValueError, match=r"total of 'gemm'.*'triton', 'extern', 'aten'"):
        result.total("gemm")  # type: ignore[arg-type]


def test_json() -> None:
    read = json.loads(json.dumps(previewed().to_json()))
    assert (read["target"], read["totals"]["extern"]["count"]) == ("H100", 6)
    assert read["graphs"][0]["launches"][1]["layers"] == ["1"]
    assert read["graphs"][0]["saved"][0]["nbytes"] == 2 * H


def test_a_result_stays_as_it_is() -> None:
    with pytest.raises(FrozenInstanceError):
        previewed().graphs[0].launches[0].reads = 0  # type: ignore[misc]
    assert previewed().notes == ()


# Targets


def test_an_unknown_target() -> None:
    with pytest.raises(ValueError, match=r"no target 'A100'; there is H100, H200, B200, L40S"):
        f8.preview(mlp, "A100")


@pytest.mark.parametrize("target", ["H200", "B200", "L40S"])
def test_every_target(target: str) -> None:
    result = f8.preview(mlp, target.lower())
    assert result.target == target
    assert (
        f"multi_processor_count={TARGETS[target].multiprocessors}"
        in next(iter(result.graphs[0].kernels.values())).source
    )
    assert result.total("extern").count == 6


def test_seconds_are_bounds() -> None:
    """No pointwise kernel is faster than memory, no large GEMM than the multipliers; a tiny one is memory's."""
    gpu = TARGETS["H100"]
    tiny, relu, _ = previewed().graphs[0].launches
    assert relu.seconds == pytest.approx(4 * H / gpu.bandwidth)
    assert tiny.seconds == pytest.approx((tiny.reads + tiny.writes) / gpu.bandwidth)
    (large,) = of(torch.mm, (8192, 8192), (8192, 8192)).launches
    assert large.seconds == pytest.approx(2 * 8192**3 / gpu.bfloat16)
    assert large.flops / large.seconds < TARGETS["B200"].bfloat16


def test_a_float32_gemm_is_bounded_by_what_it_may_use() -> None:
    gpu = TARGETS["H100"]
    assert (gpu.peak(FP32), gpu.peak(BF16), gpu.peak(torch.float8_e4m3fn)) == (gpu.float32, gpu.bfloat16, gpu.float8)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert gpu.peak(FP32) == gpu.tf32
    finally:
        torch.set_float32_matmul_precision(before)


# Models

WEIGHTS = ((K, HIDDEN), (HIDDEN, K))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(recipe: str) -> None:
    result = f8.preview(lambda: mlp(lambda model: f8.convert_to_float8_training(model, config=recipe)))
    gemms = [launch for launch in result.launches if launch.kind == "extern"]
    assert [launch.name for launch in gemms] == ["aten._scaled_mm"] * 6
    assert all(launch.dtypes.startswith("float8_e") for launch in gemms)
    assert {launch.flops for launch in gemms} == {2 * M * K * HIDDEN}
    assert result.notes == ()


def method(model: nn.Module) -> Callable[..., Any]:
    return model.forward


def closure(model: nn.Module) -> Callable[..., Any]:
    return lambda x: model(x)


@pytest.mark.parametrize("called", [lambda model: model, method, closure], ids=["module", "method", "closure"])
def test_delayed_scaling_is_shown_in_its_steady_state(called: Callable[[nn.Module], Any]) -> None:
    """Not the first step, in which kernels read weights for their amax."""

    def build() -> Any:
        model, x = mlp(lambda model: f8.convert_to_float8_training(model, config="delayed"))
        return called(model), x

    reading = [
        launch.ops
        for launch in f8.preview(build).launches
        for buffer in launch.buffers
        if buffer.shape in WEIGHTS and buffer.reads
    ]
    assert reading
    assert not any("aten.amax.default" in ops for ops in reading)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=["relu", "gelu"])
def test_the_gradient_of_a_bias_does_not_make_a_transposed_cast_uncoalesced(activation: nn.Module) -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(1024, 2048), activation, nn.Linear(2048, 1024)).bfloat16()
        return f8.convert_to_float8_training(model, config="delayed"), batch(4096, 1024)

    for launch in f8.preview(build).launches:
        assert launch.sectors <= 1.1 * (launch.reads + launch.writes), launch.name


def test_a_kept_weight_is_saved() -> None:
    """Layer by layer: "0" keeps its float8 weight, "2" casts it again."""

    def convert(model: nn.Sequential) -> None:
        f8.convert_to_float8_training(model, recompute_weight_cast=lambda linear, fqn: fqn != "2")
        model[2].recompute_weight_cast = True
        model[0].recompute_weight_cast = False

    forward, _ = f8.preview(lambda: mlp(convert)).graphs
    weights = [s for s in forward.saved if s.dtype == "float8_e4m3fn" and s.nbytes == W]
    assert [s.layers for s in weights] == [("0",)]


def test_without_gradients() -> None:
    def build() -> Any:
        model, x = mlp()
        return torch.no_grad()(lambda x: model(x)), x

    (graph,) = f8.preview(build).graphs
    assert (graph.phase, graph.saved) == ("inference", ())
    assert names(graph) == ["aten.mm", "triton", "aten.mm"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, hidden otherwise
def test_a_graph_break_is_in_the_notes() -> None:
    def build() -> Any:
        model, x = mlp()

        def forward(x: Tensor) -> Tensor:
            hidden = model[0](x)
            torch._dynamo.graph_break()
            return model[2](hidden.relu())

        return forward, x

    result = f8.preview(build)
    assert [graph.phase for graph in result.graphs] == ["forward", "forward", "backward", "backward"]
    assert [launch.layers[0] for graph in result.graphs for launch in graph.launches if launch.kind == "extern"] == [
        "0", "2", "2", "2", "0", "0",
    ]  # fmt: skip
    assert len(result.notes) == 1
    assert result.notes[0].startswith("graph break")


def test_checkpointing_runs_forward_again() -> None:
    def build() -> Any:
        model, x = mlp()
        return lambda x: checkpoint(model, x, use_reentrant=False), x

    forward, backward = f8.preview(build).graphs
    assert forward.saved == ()
    assert names(backward).count("aten.mm") == 5


def test_dropout() -> None:
    forward, backward = f8.preview(lambda: (nn.Dropout(0.25), batch())).graphs
    (dropped,) = (launch for launch in forward.launches if launch.kind == "triton")
    assert [(s.dtype, s.nbytes) for s in forward.saved] == [("bool", X)]
    assert dropped.writes == 3 * X, "bfloat16 and the mask"
    assert names(backward) == ["triton"]


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    """64 rows of 128 float32, of a table a thousand times as large; whole sectors, since a row is contiguous."""
    forward, _ = f8.preview(lambda: (nn.Embedding(64_000, 128), torch.randint(64_000, (64,)))).graphs
    (launch,) = forward.launches
    table = max(launch.buffers, key=lambda buffer: buffer.shape)
    assert (table.shape, table.reads, table.sectors) == ((64_000, 128), 64 * 128 * 4, 64 * 128 * 4)


def test_a_language_model_with_loss() -> None:
    def build() -> Any:
        table, head = nn.Embedding(1000, 64), nn.Linear(64, 1000)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(head(table(tokens)).flatten(0, 1), targets.flatten())

        return loss, (torch.randint(1000, (4, 32)), torch.randint(1000, (4, 32)))

    result = f8.preview(build)
    assert result.notes == ()
    assert {"table", "head"} <= {layer for launch in result.launches for layer in launch.layers}


@pytest.mark.parametrize("compiled", ["the model", "a layer"])
def test_what_is_compiled_already(compiled: str) -> None:
    def build() -> Any:
        model, x = mlp()
        if compiled == "the model":
            return torch.compile(model), x
        model[0].compile()
        return model, x

    assert [launch.layers for launch in f8.preview(build).graphs[0].launches] == [("0",), ("1",), ("2",)]


def test_arguments() -> None:
    def build() -> Any:
        return (lambda x, *, y: x * y), (batch(requires_grad=False),), {"y": batch(requires_grad=False)}

    (launch,) = f8.preview(build).launches
    assert (launch.reads, launch.writes) == (4 * X, 2 * X)


class State:
    """What delayed scaling has: a tensor that is nobody's buffer."""

    def __init__(self, amax: Tensor, grad_amax: Tensor) -> None:
        self.amax, self.grad_amax = amax, grad_amax


class Watched(torch.autograd.Function):
    """x, whose amax goes into one state, and its gradient's into another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, grad_amax: Tensor) -> Tensor:
        ctx.grad_amax = grad_amax
        amax.copy_(torch.maximum(amax, x.detach().abs().amax().float()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.grad_amax.copy_(torch.maximum(ctx.grad_amax, grad.abs().amax().float()))
        return grad, None, None


def test_state_that_both_graphs_change() -> None:
    """Two layers' amaxes, views of one vector in plain attributes, are read and written in place."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Watched.apply(x, self.state.amax, self.state.grad_amax))

    def build() -> Any:
        amaxes = torch.zeros(4)
        layers = [Layer(K, K, bias=False, dtype=BF16) for _ in range(2)]
        for i, layer in enumerate(layers):
            layer.state = State(amaxes[2 * i], amaxes[2 * i + 1])
        return nn.Sequential(*layers), batch()

    result = f8.preview(build)
    assert [graph.phase for graph in result.graphs] == ["forward", "backward"]
    for graph in result.graphs:
        inputs = graph.code.split("def call(self, args):\n")[1].split(" = args")[0].split(", ")
        written = {b.tensor.strip() for la in graph.launches for b in la.buffers if b.writes}
        assert written & {name.strip() for name in inputs}, "an input is written to"
    assert result.notes == ()


# What depends on the device


def attention(dtype: torch.dtype = BF16, **options: Any) -> Preview:
    def build() -> Any:
        heads = [batch(2, 8, 128, 64, dtype=dtype) for _ in range(3)]
        return (lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options)), tuple(heads)

    return f8.preview(build)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}], ids=["full", "causal", "dropout"])
def test_attention_is_cudas(options: dict[str, Any]) -> None:
    forward, backward = attention(**options).graphs
    assert [launch.name for launch in forward.launches] == ["aten._scaled_dot_product_flash_attention"]
    assert [launch.name for launch in backward.launches] == ["aten._scaled_dot_product_flash_attention_backward"]
    flops = 2 * 2 * (2 * 8) * 128 * 128 * 64  # two products of each head
    assert forward.launches[0].flops == (flops // 2 if "is_causal" in options else flops)


def test_attention_with_a_mask_or_in_float32_is_the_memory_efficient_one() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0)

    shape = (2, 8, 128, 64)
    for result in (of(masked, shape, shape, shape, (128, 128)), attention(dtype=FP32)):
        assert "aten._scaled_dot_product_efficient_attention" in {launch.name for launch in result.launches}


def test_attention_by_hand_is_recognised() -> None:
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.dropout((q @ k.transpose(-1, -2) * 0.125).softmax(-1), 0.1) @ v

    shape = (2, 8, 128, 64)
    result = of(by_hand, shape, shape, shape, requires_grad=True)
    assert result.launches[0].name == "aten._scaled_dot_product_flash_attention"
    assert "written by hand" in result.notes[0]


@pytest.mark.parametrize(("norm", "statistics"), [(nn.LayerNorm, 2), (nn.RMSNorm, 1)])
def test_norms_keep_float32_statistics(norm: type[nn.Module], statistics: int) -> None:
    """Of a bfloat16 input: CPU tensors would have bfloat16 ones of a LayerNorm."""
    forward, _ = f8.preview(lambda: (norm(K).bfloat16(), batch())).graphs
    assert [(s.dtype, s.nbytes) for s in forward.saved] == [("float32", 4 * M)] * statistics
    assert names(forward) == ["triton"]


def test_a_column_times_a_row_is_no_gemm() -> None:
    """Backward of a layer with one output: on a GPU Inductor multiplies it out."""
    _, backward = f8.preview(lambda: (nn.Linear(K, 1, bias=False, dtype=BF16), batch())).graphs
    assert sorted(names(backward)) == ["aten.mm", "triton"]


# The user's own kernels, and Inductor's settings


SIZE = 2 * 1024 * 2048  # bytes of a matrix


def test_a_kernel_of_the_users_own() -> None:
    (launch,) = of(user_kernels.add, (1024, 2048), (1024, 2048)).launches
    assert (launch.kind, launch.name) == ("triton", "add_kernel")
    assert (launch.reads, launch.writes, launch.sectors) == (2 * SIZE, SIZE, 3 * SIZE)


def test_a_triton_op() -> None:
    """It reads rows, and stores columns: in tiles, or one at a time, where each element costs a sector of 16."""
    result = of(user_kernels.transposed, (1024, 2048))
    (launch,) = result.launches
    assert (launch.reads, launch.writes, launch.sectors) == (SIZE, SIZE, 2 * SIZE)
    (kernel,) = result.graphs[0].kernels.values()
    assert [config.sectors for config in kernel.configs] == [2 * SIZE, SIZE + 16 * SIZE]


@pytest.mark.filterwarnings("ignore:.*make_block_ptr is deprecated")
def test_what_cant_be_read_from_a_kernel_is_in_the_notes() -> None:
    result = of(user_kernels.through_a_block_pointer, (1024, 2048))
    (launch,) = result.launches
    assert (launch.reads, launch.writes, launch.sectors) == (SIZE, SIZE, 2 * SIZE)
    (note,) = result.notes
    assert "block_pointer_kernel: what it touches of x_ptr can't be read from its source" in note


def test_combined_kernels() -> None:
    """Inductor's setting that joins small kernels: fewer launches, the same bytes."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y * 2

    shapes = (4096, 4096), (64, 64)
    apart = of(two, *shapes)
    with torch._inductor.config.patch(combo_kernels=True, benchmark_combo_kernel=False):
        joined = of(two, *shapes)
    assert (len(apart.launches), len(joined.launches)) == (2, 1)
    assert joined.total() == dataclasses.replace(apart.total(), count=1, seconds=joined.total().seconds)


def test_what_inductor_would_find_out_by_timing_is_in_the_notes() -> None:
    """A large GEMM of sizes that aren't aligned might be padded; a small one, bound by memory, would not be."""
    (note,) = of(torch.mm, (8192, 4096), (4096, 50257)).notes
    assert note.startswith(
        "aten.mm of (8192, 4096) x (4096, 50257): on the GPU Inductor times whether it pays to pad to multiples of 8;"
    )
    assert of(torch.mm, (8, 4096), (4096, 50257)).notes == ()


@pytest.mark.parametrize(
    "setting",
    [
        "benchmark_combo_kernel",
        "benchmark_fusion",
        "coordinate_descent_tuning",
        "cpp_wrapper",
        "max_autotune",
        "max_autotune_gemm",
        "triton.mix_order_reduction_autotune_split_size",
        "triton.multi_kernel",
    ],
)
def test_a_setting_that_needs_the_device_while_code_is_generated_is_off_and_in_the_notes(setting: str) -> None:
    """torchao's quantize_ turns coordinate_descent_tuning on for the whole process: a norm's backward is then timed."""
    build = lambda: (nn.Sequential(nn.RMSNorm(1024), nn.Linear(1024, 1024)).bfloat16(), batch(8192, 1024))  # noqa: E731
    expected = f8.preview(build)
    with torch._inductor.config.patch({setting: True, "combo_kernels": setting == "benchmark_combo_kernel"}):
        result = f8.preview(build)
    assert result.notes == (f"Inductor's {setting} is off in a preview",)
    if setting != "benchmark_combo_kernel":
        assert result.total() == expected.total()


def test_machine_code() -> None:
    """A cast to float8: the hardware's conversion, registers, no spills, PTX for Hopper."""

    def cast(x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn)

    build = lambda: (cast, batch(requires_grad=False))  # noqa: E731
    for config in next(iter(f8.preview(build).graphs[0].kernels.values())).configs:
        assert config.registers is config.spills is config.shared is config.float8_conversions is config.ptx is None
    result = f8.preview(build, compile_kernels=True)
    (kernel,) = result.graphs[0].kernels.values()
    for config in kernel.configs:
        assert config.ptx is not None
        assert ".target sm_90" in config.ptx
        assert config.float8_conversions
        assert config.registers
        assert config.spills == 0 == config.shared
    assert result.notes == ()


# What it can't model, it says


def refused(function: Callable[[Tensor], Any], x: Callable[[], Tensor] = batch) -> pytest.ExceptionInfo[Exception]:
    with pytest.raises((NotImplementedError, ValueError)) as info:
        f8.preview(lambda: (function, x()))
    return info


def autocast(device: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=BF16):
            return x @ x.t()

    return forward


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_autocast(device: str) -> None:
    error = refused(autocast(device), lambda: batch(dtype=FP32))
    assert error.type.__mro__[1] is NotImplementedError
    assert "cannot model torch.autocast" in str(error.value)
    assert ".bfloat16()" in str(error.value)


def test_autocast_around_the_preview() -> None:
    with torch.autocast("cpu"), pytest.raises(NotImplementedError, match=r'cannot model torch.autocast\("cpu"\)'):
        f8.preview(mlp)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cuda() + 1,
        lambda x: x.to("cuda") + 1,
        lambda x: x + torch.ones(K, device="cuda"),
        lambda x: (torch.cuda.Stream(), x + 1),
    ],
    ids=["cuda()", "to", "device=", "Stream"],
)
def test_what_needs_cuda_itself(function: Callable[[Tensor], Any]) -> None:
    assert "the model asks for CUDA itself" in str(refused(function).value)


def test_values() -> None:
    assert "tensors have none" in str(refused(lambda x: x * x.sum().item()).value)


def test_tensors_that_are_made_elsewhere() -> None:
    error = refused(lambda x: x + 1, lambda: torch.ones(2, device="cpu"))
    assert isinstance(error.value, ValueError)
    assert "is on cpu" in str(error.value)
    assert "make it with device=x.device" in str(refused(lambda x: x + torch.ones(K)).value)


def test_a_failure_of_the_model_is_its_own() -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(Exception, match="no such thing") as info:
        f8.preview(lambda: (broken, batch()))
    assert not isinstance(info.value, NotImplementedError)


def test_nothing_compiled_is_in_the_notes() -> None:
    result = f8.preview(lambda: (lambda x: x, batch()))
    assert result.graphs == ()
    assert "nothing was compiled" in result.notes[0]


# Nothing stays behind


def test_a_model_that_was_there_before_is_left_as_it_was() -> None:
    with torch.device("meta"):
        model, x = mlp()
    parameters = dict(model.named_parameters())
    f8.preview(lambda: (model, x))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(p.grad is None and p.is_meta for p in (*parameters.values(), x))


def test_nothing_is_allocated() -> None:
    """68 GB of weights; a preview of them takes no memory and no longer than others."""
    build = lambda: (nn.Linear(131072, 262144, bias=False, dtype=BF16), batch(16, 131072))  # noqa: E731
    assert max(launch.reads for launch in f8.preview(build).launches) > 2 * 131072 * 262144


def test_compiling_for_the_cpu_goes_on_as_before() -> None:
    """In one process: compile for the CPU, preview, compile for the CPU; the settings, and what torch remembers."""
    printed = run_python(
        """
        import functools, os, warnings
        warnings.simplefilter("ignore")  # what torch deprecates of itself
        import torch
        import torch._dynamo, torch._functorch.config, torch._inductor.config
        from torch import nn
        import float8_compile as f8

        def model():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def step(model, run):
            y = run(torch.arange(64.0).view(4, 16) / 64)
            y.sum().backward()
            return y.detach(), model[0].weight.grad

        def is_right():
            eager, compiled = model(), model()
            expected, found = step(eager, eager), step(compiled, torch.compile(compiled))
            return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found))

        def settings():
            configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
            return [config.get_config_copy() for config in configs], dict(os.environ), torch.get_default_device()

        def remembered():
            for module in [module for name, module in sys.modules.items() if name.startswith("torch.")]:
                for owner in (module, *(thing for thing in vars(module).values() if type(thing) is type)):
                    for thing in vars(owner).values():
                        thing = thing.__func__ if type(thing) in (classmethod, staticmethod) else thing
                        if isinstance(thing, functools._lru_cache_wrapper) and thing.cache_info().currsize:
                            try:
                                yield repr(thing())
                            except Exception:
                                pass  # it has arguments, or fails without a GPU

        print(is_right())
        before = settings()
        with torch.device("meta"):
            inside = model().bfloat16(), torch.randn(4, 16, dtype=torch.bfloat16)
        print(len(f8.preview(lambda: inside, "L40S").graphs))
        print(settings() == before, torch.cuda.is_available(), torch.version.cuda)
        print(is_right(), any("L40S" in answer for answer in remembered()))
        try:
            torch.ones(1, device="cuda")[0]
        except (AssertionError, RuntimeError) as error:
            print(type(error).__name__)
        """
    )
    assert printed.splitlines()[:2] == ["True", "2"]
    assert printed.splitlines()[2:4] == [f"True {torch.cuda.is_available()} {torch.version.cuda}", "True False"]


def test_importing_it_brings_no_compiler() -> None:
    printed = run_python(
        """
        import float8_compile.preview
        print([name for name in ("torch._inductor", "torch._dynamo", "triton", "numpy.random") if name in sys.modules])
        print(callable(float8_compile.preview), float8_compile.preview.TARGETS["H100"].name)
        """
    )
    assert printed.splitlines() == ["[]", "True H100"]


# One layer of Llama-3-8B, 8192 tokens


def rowwise_of_torchao(model: nn.Module) -> None:
    torchao = pytest.importorskip("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    torchao.convert_to_float8_training(model, config=config)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the counts are those of torch 2.13")
@pytest.mark.parametrize(
    ("convert", "launches", "nbytes", "sectors"),
    [
        (lambda model: None, 19, 4_731_527_168, 4_731_527_168),
        (rowwise_of_torchao, 76, 11_222_847_492, 14_863_503_364),
    ],
    ids=["bf16", "torchao rowwise"],
)
def test_a_layer_of_llama(convert: Callable[[nn.Module], object], launches: int, nbytes: int, sectors: int) -> None:
    """torchao's row-wise backward has a kernel that stores columns in each of its configs."""
    result = f8.preview(functools.partial(llama.build, convert))
    total = result.total("triton")
    assert (total.count, total.nbytes, total.sectors) == (launches, nbytes, sectors)
    assert result.notes == ()
