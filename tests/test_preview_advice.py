"""Advice, each kind with a graph that deserves it and graphs that nearly do.

Shapes: M tokens, K in_features, N out_features. Weights come from outside ("primals_..."), as does the model's input x.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from previews import BF16, CAST, E4M3, E5M2, FP32, gemm, graph, kernel, launch, preview, reads, writes
from torch import Tensor, nn

import float8_compile
from float8_compile.preview.advice import KINDS, Advice, advise
from float8_compile.preview.dataflow import Dataflow, Value
from float8_compile.preview.result import Graph, Launch, Preview
from float8_compile.preview.summary import text
from float8_compile.variants import Build, variant

M, K, N = 8192, 4096, 2048
AMAX = ("aten.abs.default", "aten.amax.default")


def found(*graphs: Graph, kind: str) -> list[Advice]:
    return [advice for advice in advise(preview(*graphs)) if advice.kind == kind]


# Float8 that is only moved


def a_copy(ops: tuple[str, ...] = ("aten.clone.default",)) -> Launch:
    return launch(reads(E4M3, (M, K)), writes(E4M3, (K, M)), name="triton_poi_fused_clone_3", layers=("up",), ops=ops)


def test_a_copy_of_float8_that_was_not_fused() -> None:
    [advice] = found(graph(a_copy(), phase="backward"), kind="copy")
    assert advice == Advice(
        "copy",
        ("up",),
        2 * M * K,
        "up: poi_fused_clone_3 only moves float8 in backward, 67.1 MB in sectors, at least 20.0 us: a copy, mostly a "
        "transposed one, that was not fused with the cast before it",
    )


def test_a_copy_that_pads_has_another_remedy() -> None:
    [advice] = found(graph(a_copy(("aten.constant_pad_nd.default",))), kind="copy")
    assert "no multiple of 16" in advice.text


@pytest.mark.parametrize(
    "innocent",
    [
        launch(reads(BF16, (M, K)), writes(E4M3, (M, K)), ops=CAST),
        launch(reads(E4M3, (M, K)), writes(BF16, (M, K)), ops=("prims.convert_element_type.default",)),
        launch(reads(E4M3, (M, K)), reads(BF16, (M, K)), writes(E4M3, (M, K))),
        launch(reads(E4M3, (64, 64)), writes(E4M3, (64, 64)), ops=("aten.clone.default",)),
        gemm(reads(E4M3, (M, K)), reads(E4M3, (K, N)), writes(BF16, (M, N))),
        launch(writes(E4M3, (M, K)), ops=("aten.full.default",)),
    ],
    ids=["cast", "cast back", "reads bf16 too", "small", "GEMM", "fills"],
)
def test_what_is_no_mere_copy(innocent: Launch) -> None:
    assert found(graph(innocent), kind="copy") == []


def test_scales_beside_a_copy_do_not_hide_it() -> None:
    with_scale = launch(
        reads(E4M3, (M, K)), reads(FP32, ()), writes(E4M3, (K, M)), writes(FP32, ()), ops=("aten.clone.default",)
    )
    assert len(found(graph(with_scale), kind="copy")) == 1


# A tensor that is read for its amax alone


def amax(tensor: str = "buf0", ops: tuple[str, ...] = AMAX, shape: tuple[int, ...] = (M, K)) -> Launch:
    return launch(reads(BF16, shape, tensor), writes(FP32, (512,), "buf8"), name="triton_red_fused_amax_1", ops=ops)


def finish() -> Launch:
    return launch(reads(FP32, (512,), "buf8"), writes(FP32, (), "buf9"), name="triton_red_fused_amax_2", ops=AMAX)


def cast(tensor: str = "buf0", shape: tuple[int, ...] = (M, K)) -> Launch:
    return launch(
        reads(BF16, shape, tensor), reads(FP32, (), "buf9"), writes(E4M3, shape, "buf1"),
        name="triton_poi_fused_mul_3", ops=CAST,
    )  # fmt: skip


def test_a_tensor_that_is_read_once_for_its_amax_and_once_to_be_cast() -> None:
    [advice] = found(graph(amax(), finish(), cast()), kind="amax")
    assert (advice.layers, advice.nbytes) == (("up",), 2 * M * K)
    assert advice.text == (
        "up: red_fused_amax_1 reads 67.1 MB in forward for an amax alone, at least 20.0 us, and poi_fused_mul_3 reads "
        'it again to cast it: with config="delayed" one kernel can do both'
    )


def test_torchao_writes_amax_as_max_of_abs() -> None:
    launches = amax(ops=("aten.abs.default", "aten.max.default")), finish(), cast()
    assert len(found(graph(*launches), kind="amax")) == 1


def test_other_reductions_in_the_same_kernel_are_mentioned() -> None:
    launches = amax(ops=(*AMAX, "aten.mean.dim", "aten.rsqrt.default")), finish(), cast()
    [advice] = found(graph(*launches), kind="amax")
    assert "an amax among other reductions" in advice.text


@pytest.mark.parametrize(
    "launches",
    [
        (amax(), finish()),
        (amax(), finish(), cast("buf5")),
        (amax(), cast("buf0")),
        (amax(ops=("aten.sum.default",)), finish(), cast()),
        (amax(shape=(64, 64)), finish(), cast(shape=(64, 64))),
        (cast(), amax(), finish()),
        (amax(), launch(writes(BF16, (M, K), "buf0"), name="triton_poi_fused_4"), finish(), cast()),
    ],
    ids=["no cast", "of another tensor", "without this amax", "a sum", "small", "cast before", "written in between"],
)
def test_an_amax_that_costs_no_second_reading(launches: tuple[Launch, ...]) -> None:
    assert found(graph(*launches), kind="amax") == []


def test_an_amax_that_is_taken_while_casting() -> None:
    one = launch(
        reads(BF16, (M, K), "buf0"), writes(E4M3, (M, K), "buf1"), writes(FP32, (M,), "buf2"), ops=(*AMAX, *CAST)
    )
    later = launch(reads(BF16, (M, K), "buf0"), reads(FP32, (M,), "buf2"), writes(E4M3, (M, K), "buf3"), ops=CAST)
    assert found(graph(one, later), kind="amax") == []


# Sectors


def scattered(excess: float) -> Launch:
    return launch(reads(BF16, (M, K)), writes(E4M3, (K, M), excess=excess), name="triton_poi_fused_mul_5", ops=CAST)


def test_a_kernel_none_of_whose_configs_is_coalesced() -> None:
    kernels = {"triton_poi_fused_mul_5": kernel("triton_poi_fused_mul_5", None, None)}
    [advice] = found(graph(scattered(8.0), kernels=kernels), kind="sectors")
    assert advice.nbytes == (2 + 8) * M * K
    assert advice.text == (
        "up: poi_fused_mul_5 moves 335.5 MB in sectors for 100.7 MB in forward, at least 70.1 us lost: none of its 2 "
        "configs is coalesced"
    )


@pytest.mark.parametrize("excess", [1.0, 1.5])
def test_a_kernel_that_is_nearly_coalesced(excess: float) -> None:
    """2 + 1.5 bytes in sectors for 3 bytes: the edges of tiles."""
    assert found(graph(scattered(excess)), kind="sectors") == []


def test_a_small_kernel_may_be_scattered() -> None:
    small = launch(reads(BF16, (64, 64)), writes(E4M3, (64, 64), excess=32.0))
    assert found(graph(small), kind="sectors") == []


# Spills


@pytest.mark.parametrize(
    ("spills", "advised"),
    [((8, 24), True), ((16,), True), ((0, 24), False), ((0,), False), ((None, None), False)],
    ids=["every config", "the only one", "not every one", "none", "not compiled"],
)
def test_spills(spills: tuple[int | None, ...], advised: bool) -> None:
    one = scattered(1.0)
    advice = found(graph(one, kernels={one.name: kernel(one.name, *spills)}), kind="spills")
    assert len(advice) == advised
    if advised:
        least = min(each or 0 for each in spills)
        assert f"spills registers to memory in forward: at least {least} bytes a thread" in advice[0].text


# A weight that is cast in forward and in backward


def cast_weight(out: str, transposed: bool = False, weight: str = "primals_2") -> Launch:
    shape = (K, N) if transposed else (N, K)
    return launch(reads(BF16, (N, K), weight), writes(E4M3, shape, out), name="triton_poi_fused_mul_7", ops=CAST)


def forward(layer: str = "up", weight: str = "primals_2") -> Graph:
    x8, w8 = reads(E4M3, (M, K), "buf0"), reads(E4M3, (K, N), "buf1")
    return graph(
        launch(reads(BF16, (M, K), "primals_1"), writes(E4M3, (M, K), "buf0"), ops=CAST),
        cast_weight("buf1", weight=weight),
        gemm(x8, w8, writes(BF16, (M, N), "buf2"), layers=(layer,)),
    )


def backward(*before: Launch, layer: str = "up", weight: str = "buf1") -> Graph:
    """grad_input alone. weight: where its right operand is."""
    g8, w8 = reads(E5M2, (M, N), "buf0"), reads(E4M3, (N, K), weight)
    cast_g = launch(reads(BF16, (M, N), "tangents_1"), writes(E5M2, (M, N), "buf0"), ops=CAST)
    product = gemm(g8, w8, writes(BF16, (M, K), "buf2"), layers=(layer,))
    return graph(*before, cast_g, product, phase="backward")


def test_a_weight_that_is_cast_again_in_backward() -> None:
    [advice] = found(forward(), backward(cast_weight("buf1", transposed=True)), kind="weight cast twice")
    assert (advice.layers, advice.nbytes) == (("up",), 2 * N * K)
    assert advice.text == (
        "up: cast in forward and again in backward; float8_compile's recompute_weight_cast=False keeps 8.4 MB in "
        "between and spares 16.8 MB of traffic, at least 5.0 us each time"
    )


def test_all_such_weights_are_one_piece_of_advice() -> None:
    """Of a model that a graph break cuts in two: the second forward graph's backward runs first."""
    graphs = [
        forward("up"),
        forward("down", "primals_5"),
        backward(cast_weight("buf1", weight="primals_5"), layer="down"),
        backward(cast_weight("buf1"), layer="up"),
    ]
    [advice] = found(*graphs, kind="weight cast twice")
    assert (advice.layers, advice.nbytes) == (("up", "down"), 4 * N * K)


@pytest.mark.parametrize(
    "graphs",
    [
        (forward(), backward(weight="convert_element_type_3")),
        (forward(),),
        (forward(), backward(cast_weight("buf1", weight="primals_9"))),
        (forward("up"), backward(cast_weight("buf1"), layer="down")),
        (forward(), backward(cast_weight("buf1"), weight="buf9")),
    ],
    ids=["kept", "no backward", "another weight", "of another layer", "cast for something else"],
)
def test_a_weight_that_is_cast_once(graphs: tuple[Graph, ...]) -> None:
    assert found(*graphs, kind="weight cast twice") == []


def test_the_models_input_is_no_weight() -> None:
    """x is the left operand in forward; in backward it is cast again, as the right operand of grad_weight."""
    cast_x = launch(reads(BF16, (M, K), "primals_1"), writes(E4M3, (K, M), "buf1"), ops=CAST)
    g8, x8 = reads(E5M2, (N, M), "buf0"), reads(E4M3, (M, K), "buf1")
    again = graph(cast_x, gemm(g8, x8, writes(BF16, (N, K), "buf2")), phase="backward")
    assert found(forward(), again, kind="weight cast twice") == []


# Layers that read the same tensor


def traced(*layers: tuple[str, str, str]) -> Graph:
    """A forward graph of (layer, name of what it casts, name of its scale); a scale that is shared is one cast."""
    casts = dict.fromkeys((source, scale) for _, source, scale in layers)
    lines = [
        line
        for source, scale in casts
        for line in (
            f'        view_{source}_{scale}: "bf16[]" = torch.ops.aten.reshape.default({source}, [-1, {K}])',
            f'        f_{source}_{scale}: "f32[]" = torch.ops.aten._to_copy.default(view_{source}_{scale})',
            f'        mul_{source}_{scale}: "f32[]" = torch.ops.aten.mul.Tensor(f_{source}_{scale}, {scale})',
            f'        c_{source}_{scale}: "f32[]" = torch.ops.aten.clamp_min.default(mul_{source}_{scale}, -448.0)',
            f'        x8_{source}_{scale}: "f8e4m3fn[]" = torch.ops.prims.convert_element_type.default('
            f"c_{source}_{scale}, torch.float8_e4m3fn)",
        )
    ]
    lines += [
        f'        _scaled_mm_{layer}: "bf16[]" = torch.ops.aten._scaled_mm.default(x8_{source}_{scale}, permute, s, t)'
        for layer, source, scale in layers
    ]
    gemms = [
        gemm(
            reads(E4M3, (M, K)), reads(E4M3, (K, N)), writes(BF16, (M, N)),
            layers=(layer,), nodes=(f"permute_{layer}", f"_scaled_mm_{layer}"),
        )
        for layer, *_ in layers
    ]  # fmt: skip
    return graph(*gemms, fx="\n".join(lines))


def test_layers_that_cast_the_same_tensor_each_with_its_own_scale() -> None:
    q_k_v = traced(("q", "norm", "s1"), ("k", "norm", "s2"), ("v", "norm", "s3"))
    [advice] = found(q_k_v, kind="input cast twice")
    assert (advice.layers, advice.nbytes) == (("q", "k", "v"), 2 * M * K)
    assert advice.text == (
        "q, k, v: read the same tensor and have 3 casts of it made, 33.6 MB each; with one scale (k.input_scale = "
        "q.input_scale, which `calibrate` does by itself) at least 67.1 MB of traffic are spared, 20.0 us or more"
    )


@pytest.mark.parametrize(
    "layers",
    [
        [("q", "norm", "s1"), ("k", "norm", "s1")],
        [("q", "norm", "s1"), ("k", "other", "s2")],
        [("q", "norm", "s1")],
    ],
    ids=["one scale", "two tensors", "one layer"],
)
def test_layers_that_need_a_cast_each(layers: list[tuple[str, str, str]]) -> None:
    assert found(traced(*layers), kind="input cast twice") == []


def test_tensors_that_come_from_one_are_not_one() -> None:
    """norm1(x) and norm2(x): the way back ends at the product before the scale's."""
    two_norms = traced(("q", "mul_1", "s1"), ("k", "mul_2", "s2"))
    producers = [f'        mul_{n}: "bf16[]" = torch.ops.aten.mul.Tensor(x, primals_{n})' for n in (1, 2)]
    both = replace(two_norms, fx="\n".join([*producers, two_norms.fx]))
    assert found(both, kind="input cast twice") == []


@pytest.mark.parametrize("added", ["sub", "residual"])
def test_only_what_makes_infinities_nan_may_be_added_on_the_way_to_the_tensor(added: str) -> None:
    """`x * scale + (x - x)`, which is how a delayed cast lets an infinity through as NaN."""
    fx = traced(("q", "norm", "s1"), ("k", "norm", "s2")).fx
    for scale in ("s1", "s2"):
        product = f"mul_norm_{scale}"
        makers = (
            f'        {added}_{scale}: "f32[]" = torch.ops.aten.{added}.Tensor(f_norm_{scale}, f_norm_{scale})\n'
            f'        sum_{scale}: "f32[]" = torch.ops.aten.add.Tensor({product}, {added}_{scale})\n'
        )
        clamp = f"        c_norm_{scale}"
        fx = fx.replace(clamp, makers + clamp).replace(f"default({product}", f"default(sum_{scale}")
    shared = found(replace(traced(("q", "norm", "s1"), ("k", "norm", "s2")), fx=fx), kind="input cast twice")
    assert len(shared) == (added == "sub")


# Casts that cost more than the GEMM saves


def linear_step(m: int, k: int, n: int, source: Launch | None = None) -> Preview:
    """Forward alone: x is cast (by `source`, if that is given), the weight is cast, and both are multiplied."""
    x8, w8 = reads(E4M3, (m, k), "buf0"), reads(E4M3, (k, n), "buf1")
    cast_x = source or launch(reads(BF16, (m, k), "buf7"), writes(E4M3, (m, k), "buf0"), ops=CAST)
    cast_w = launch(reads(BF16, (n, k), "primals_2"), writes(E4M3, (n, k), "buf1"), ops=CAST)
    return preview(graph(cast_x, cast_w, gemm(x8, w8, writes(BF16, (m, n), "buf2"))))


def test_a_layer_whose_casts_cost_more_than_its_gemm_saves() -> None:
    """3 bytes an element of x and w; the GEMM is 2 M K N operations, at twice the speed."""
    m, k, n = 16384, 512, 512
    [advice] = [each for each in advise(linear_step(m, k, n)) if each.kind == "costs more than it saves"]
    nbytes = 3 * (m * k + n * k)
    assert (advice.layers, advice.nbytes) == (("up",), nbytes)
    high_precision = (2 * m * k + 2 * n * k + 2 * m * n) / 3.352e12  # 10 us; 8.7 at the peak of bfloat16
    float8 = (m * k + n * k + 2 * m * n) / 3.352e12
    assert advice.text == (
        f"up: its casts move 26.0 MB, {nbytes / 3.352e12 * 1e6:.1f} us at datasheet speed, and float8 saves its GEMMs "
        f"{(high_precision - float8) * 1e6:.1f} us of {high_precision * 1e6:.1f} us: leave it out with module_filter_fn"
    )


def test_a_large_layer_gains() -> None:
    assert [each for each in advise(linear_step(16384, 4096, 4096)) if each.kind == "costs more than it saves"] == []


def test_a_cast_that_is_fused_into_its_producer_costs_nothing() -> None:
    m, k, n = 16384, 512, 512
    norm = (*CAST, "aten.mean.dim", "aten.rsqrt.default")
    fused = launch(reads(BF16, (m, k), "buf7"), writes(E4M3, (m, k), "buf0"), ops=norm)
    assert [each for each in advise(linear_step(m, k, n, fused)) if each.kind == "costs more than it saves"] == []


def test_a_cast_that_serves_several_layers_is_shared_by_them() -> None:
    one = linear_step(16384, 512, 512).graphs[0]
    others = [replace(each, layers=(layer,)) for layer in ("a", "b", "c") for each in one.launches[1:]]
    kinds = [{each.kind for each in advise(preview(graph(*one.launches, *more)))} for more in ((), others)]
    assert kinds == [{"costs more than it saves"}, set()]


# All together


def test_the_order_is_by_kind_and_then_by_size() -> None:
    small = launch(reads(E4M3, (M, N)), writes(E4M3, (N, M)), name="triton_poi_fused_clone_9")
    every = advise(preview(graph(small, scattered(8.0), a_copy()), backward(cast_weight("buf1"))))
    assert [advice.kind for advice in every] == ["sectors", "copy", "copy"]
    assert every[1].nbytes > every[2].nbytes
    assert set(KINDS) >= {advice.kind for advice in every}


def test_a_model_without_float8_gets_no_advice_about_it() -> None:
    product = launch(
        reads(BF16, (M, K), "primals_1"), reads(BF16, (K, N), "primals_2"), writes(BF16, (M, N), "buf0"),
        name="aten.mm", kind="extern", flops=2 * M * K * N,
    )  # fmt: skip
    norm = launch(reads(BF16, (M, N), "buf0"), writes(BF16, (M, N), "buf1"), ops=("aten.mean.dim",))
    assert advise(preview(graph(product, norm))) == ()


def test_buffers_without_a_name_prove_nothing() -> None:
    unnamed = [
        replace(each, buffers=tuple(replace(buffer, tensor="") for buffer in each.buffers))
        for each in (*forward().launches, amax(), finish(), cast())
    ]
    assert advise(preview(graph(*unnamed))) == ()


# Who wrote what


def test_a_storage_holds_another_value_after_each_write() -> None:
    flow = Dataflow(
        graph(
            launch(reads(BF16, (8,), "x"), writes(BF16, (8,), "buf0")),
            launch(reads(BF16, (8,), "buf0"), writes(BF16, (8,), "buf0")),
            launch(reads(BF16, (8,), "buf0"), writes(BF16, (8,), "buf1")),
        )
    )
    assert [value for value, _ in flow.reads[1]] == [Value("buf0", 1)]
    assert [value for value, _ in flow.reads[2]] == [Value("buf0", 2)]
    assert flow.writer[Value("buf0", 2)].launch == 1
    assert Value("x", 0) not in flow.writer
    assert list(flow.after(0, through=lambda _: False)) == [1]
    assert list(flow.after(0, through=lambda _: True)) == [1, 2]


# Of real models


class Branches(nn.Module):
    """Two layers that read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.Linear(1024, 2048)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.left(y) * self.right(y)


def mlp() -> tuple[nn.Module, tuple[Tensor]]:
    """Without biases: the sum of a bias's gradient keeps Inductor from coalescing the cast that it is fused with."""
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.GELU(), nn.Linear(2048, 1024, bias=False)).bfloat16()
    return model, (torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True),)


def branches() -> tuple[nn.Module, tuple[Tensor]]:
    return Branches().bfloat16(), (torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True),)


def shared_branches() -> tuple[nn.Module, tuple[Tensor]]:
    model, arguments = variant(branches, "delayed")()[:2]
    model.right.input_scale = model.left.input_scale
    return model, arguments


def narrow() -> tuple[nn.Module, tuple[Tensor]]:
    """Many tokens, few features."""
    layer = nn.Linear(256, 256, bias=False).bfloat16()
    return nn.Sequential(layer), (torch.randn(32768, 256, dtype=torch.bfloat16, requires_grad=True),)


def kinds(build: Build) -> dict[str, tuple[str, ...]]:
    """{kind: layers of the largest piece of advice}."""
    largest: dict[str, tuple[str, ...]] = {}
    for advice in advise(float8_compile.preview(build)):
        largest.setdefault(advice.kind, advice.layers)
    return largest


def test_real_dynamic_scaling_reads_twice_for_its_amax() -> None:
    advice = kinds(variant(mlp, "tensorwise"))
    assert advice["weight cast twice"] == ("0", "2")
    assert set(advice) == {"weight cast twice", "amax"}


def test_a_preview_prints_itself_with_its_advice(tmp_path: Path) -> None:
    found = float8_compile.preview(variant(narrow, "bf16"))
    assert found.advice == advise(found)
    assert str(found) == text(found)
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_real_delayed_scaling_does_not() -> None:
    assert kinds(variant(mlp, "delayed")) == {"weight cast twice": ("0", "2")}


@pytest.mark.parametrize("recipe", ["bf16", "delayed+keep"])
def test_a_real_model_with_nothing_to_advise(recipe: str) -> None:
    assert kinds(variant(mlp, recipe)) == {}


def test_real_layers_that_read_the_same_tensor() -> None:
    assert kinds(variant(branches, "delayed"))["input cast twice"] == ("left", "right")
    assert "input cast twice" not in kinds(shared_branches)


def test_a_real_layer_that_is_too_small() -> None:
    assert kinds(variant(narrow, "tensorwise"))["costs more than it saves"] == ("0",)
