"""Out of the process: torch.export, AOTInductor and ONNX, each loaded again where there is no float8_compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_python
from torch import Tensor, nn

import float8_compile as f8

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    # torch's own, where it copies its trees
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
]

K, N = 64, 32
RECIPES = list(f8.Recipe.names())
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
TOKENS = torch.export.Dim("tokens", max=4096)
OURS = ("float8_compile", "torchao")  # not to be imported where an export runs


class Block(nn.Module):
    """Attention, a gated MLP and a head, with biases here and there, and sizes that need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(K), nn.Linear(K, 3 * K), nn.Linear(K, K, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((K, 90), (K, 90), (90, K)))
        self.head = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 2, K // 2).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, K))
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(x)


def mlp(recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    """Trained for two steps, and now in `eval()`."""
    return after_training(nn.Sequential(nn.Linear(K, 96), nn.GELU(), nn.Linear(96, N)).to(dtype), recipe, batch(dtype))


def block(recipe: str) -> Any:
    return after_training(Block(), recipe, sequences())


def after_training(model: nn.Module, recipe: str, x: Tensor) -> nn.Module:
    f8.convert_to_float8_training(model, config=recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def batch(dtype: torch.dtype = torch.float32, rows: int = 12) -> Tensor:
    return torch.randn(rows, K, dtype=dtype)


def sequences(batch: int = 2, tokens: int = 12) -> Tensor:
    return torch.randn(batch, tokens, K)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise, in dB; infinite where the two are equal."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


# torch.export

MODELS = {"in eval": lambda model, x: model, "frozen": lambda model, x: f8.export.freeze_for_inference(model, [x])}
either = pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)


@either
@every_recipe
@pytest.mark.parametrize(
    ("gradients", "strict", "dynamic"),
    [(True, True, True), (True, False, True), (False, True, False), (False, False, True)],
    ids=["strict, dynamic", "dynamic", "strict, no_grad", "dynamic, no_grad"],
)
def test_an_exported_model_is_plain_ops_with_the_same_bits(
    recipe: str, made: Any, gradients: bool, strict: bool, dynamic: bool
) -> None:
    x = batch()
    model = made(mlp(recipe), x)
    with torch.set_grad_enabled(gradients):
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: TOKENS},) if dynamic else None, strict=strict)
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert all(str(node.target).startswith("aten.") for node in calls), [str(node.target) for node in calls]
    assert sum("_scaled_mm" in str(node.target) for node in calls) == 2
    held = [*exported.state_dict.values(), *exported.constants.values()]
    assert all(type(t) in (Tensor, nn.Parameter) for t in held if isinstance(t, Tensor))
    values = [node.meta["val"] for node in calls if isinstance(node.meta.get("val"), Tensor)]
    assert {type(value).__name__ for value in values} == {"FakeTensor"}
    for rows in (12, 5, 1, 30) if dynamic else (12,):
        other = batch(rows=rows)
        assert torch.equal(exported.module()(other), model(other))


@either
def test_a_transformer_block_exports_with_any_batch_and_length(made: Any) -> None:
    x = sequences()
    model = made(block("rowwise"), x)
    exported = torch.export.export(
        model, (x,), dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    )
    for shape in ((2, 12), (3, 7), (1, 30)):
        other = sequences(*shape)
        torch.testing.assert_close(exported.module()(other), model(other))


@either
def test_it_runs_in_a_process_that_has_only_torch(made: Any, tmp_path: Path) -> None:
    x, other = batch(), batch(rows=7)
    model = made(mlp("delayed"), x)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: TOKENS},))
    torch.export.save(exported, tmp_path / "model.pt2")
    run_elsewhere("torch.export.load(folder / 'model.pt2').module()", model, other, tmp_path)


def run_elsewhere(loaded: str, model: Any, x: Tensor, folder: Path, noise_in_dB: float = -torch.inf) -> None:
    """Compare what the loaded model gives for x in a new process with what this one gives here."""
    torch.save((x, model(x).detach()), folder / "expected.pt")
    code = f"""
        import pathlib, torch
        folder = pathlib.Path(sys.argv[1])
        x, expected = torch.load(folder / "expected.pt")
        model = {loaded}
        with torch.no_grad():
            actual = model(x)
        noise = (actual.double() - expected.double()).square().sum() / expected.double().square().sum()
        print(float(10 * noise.log10()))
    """
    assert float(run_python(code, str(folder), blocked=OURS, warnings="ignore")) <= noise_in_dB


# AOTInductor


@either
def test_as_a_compiled_library_it_runs_in_a_process_that_has_only_torch(made: Any, tmp_path: Path) -> None:
    """Inductor's own GELU differs from eager's by some bits, of which a few round to other float8 numbers: -50 dB."""
    x, other = batch(), batch(rows=7)
    model = made(mlp("rowwise"), x)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: TOKENS},))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    run_elsewhere("torch._inductor.aoti_load_package(str(folder / 'model.pt2'))", model, other, tmp_path, -50)


# ONNX


def onnx_program(model: nn.Module, x: Tensor, **options: Any) -> Any:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install float8_compile[onnx]")
    return f8.export.onnx(model, (x,), verbose=False, **options)


def run_onnx(path: Path, *inputs: Tensor) -> Tensor:
    """What onnxruntime gives on the CPU, in a process that has neither torch nor float8_compile."""
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install float8_compile[onnx]")
    numpy.savez(path.with_suffix(".npz"), *(x.numpy() for x in inputs))
    code = """
        import sys, numpy, onnxruntime
        session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
        arrays = numpy.load(sys.argv[2])
        feed = {i.name: arrays[f"arr_{n}"] for n, i in enumerate(session.get_inputs())}
        numpy.save(sys.argv[3], session.run(None, feed)[0])
    """
    result = path.with_suffix(".npy")
    run_python(code, str(path), str(path.with_suffix(".npz")), str(result), blocked=("torch", *OURS))
    return torch.from_numpy(numpy.load(result))


@every_recipe
def test_onnxruntime_agrees_with_the_frozen_model(recipe: str, tmp_path: Path) -> None:
    """It adds up products in another order, so that a few numbers round to other float8 ones: -45 dB."""
    x, other = sequences(), sequences(3, 7)
    frozen = f8.export.freeze_for_inference(block(recipe), [x])
    batches = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    onnx_program(frozen, x, path=tmp_path / "model.onnx", dynamic_shapes=(batches,))
    assert sqnr(run_onnx(tmp_path / "model.onnx", other), frozen(other)) > 45


@every_recipe
def test_scales_are_constants_and_weights_float8(recipe: str) -> None:
    frozen = f8.export.freeze_for_inference(block(recipe), [sequences()])
    graph = onnx_program(frozen, sequences()).model.graph
    by_name = dict(graph.initializers)
    kinds = {kind: [n for n in graph if n.op_type == f"{kind}Linear"] for kind in ("Quantize", "Dequantize")}
    # Six layers, of which gate and up read the same tensor with the same scale: it is quantized once.
    assert {kind: len(nodes) for kind, nodes in kinds.items()} == {"Quantize": 5, "Dequantize": 5 + 6}
    for node in (*kinds["Quantize"], *kinds["Dequantize"]):
        assert node.inputs[1].name in by_name, node
        assert by_name[node.inputs[1].name].dtype.name == "FLOAT"
        numbers = node.inputs[0] if node in kinds["Dequantize"] else node.outputs[0]
        assert numbers.dtype.name == "FLOAT8E4M3FN"
    weights = [node for node in kinds["Dequantize"] if node.inputs[0].name in by_name]
    assert len(weights) == 6
    rows = "rowwise" in recipe
    assert all((len(node.inputs[1].shape) == 1) == rows and ("axis" in node.attributes) == rows for node in weights)
    assert not any(node.op_type == "Expand" for node in graph if "scale" in str(node))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_another_dtype_it_becomes_float32_unless_asked_otherwise(dtype: torch.dtype, tmp_path: Path) -> None:
    x = batch(dtype)
    frozen = f8.export.freeze_for_inference(mlp("tensorwise", dtype), [x])
    onnx_program(frozen, x, path=tmp_path / "model.onnx")
    assert sqnr(run_onnx(tmp_path / "model.onnx", x.float()), frozen(x)) > 30  # what eager code rounds in between
    assert frozen[0].bias.dtype is dtype
    kept = onnx_program(frozen, x, dtype=None).model.graph
    assert {kept.inputs[0].dtype.name, kept.outputs[0].dtype.name} == {str(dtype).removeprefix("torch.").upper()}


def test_in_float16_it_runs_too(tmp_path: Path) -> None:
    x = batch(torch.float16)
    frozen = f8.export.freeze_for_inference(mlp("tensorwise", torch.float16), [x])
    onnx_program(frozen, x, path=tmp_path / "model.onnx", dtype=None)
    assert sqnr(run_onnx(tmp_path / "model.onnx", x), frozen(x)) > 30


def test_torchs_own_exporter_gives_the_same_from_its_opset_on(tmp_path: Path) -> None:
    x = batch()
    frozen = f8.export.freeze_for_inference(mlp("tensorwise"), [x])
    ours = onnx_program(frozen, x).model.graph
    torchs = torch.onnx.export(frozen, (x,), dynamo=True, opset_version=21, verbose=False).model.graph  # type: ignore[union-attr]
    assert [node.op_type for node in ours] == [node.op_type for node in torchs]


def test_beyond_the_range_it_saturates_there_too(tmp_path: Path) -> None:
    layer = f8.convert_to_float8_training(nn.Linear(K, N))
    frozen = f8.export.freeze_for_inference(layer, [torch.ones(1, K)])
    onnx_program(frozen, torch.ones(1, K), path=tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", torch.full((1, K), 1e4)), frozen(torch.ones(1, K)))


def test_a_converted_model_put_back_exports_in_high_precision() -> None:
    model = f8.convert_from_float8_training(mlp("tensorwise"))
    graph = onnx_program(model, batch()).model.graph
    assert [node.op_type for node in graph] == ["Gemm", "Gelu", "Gemm"]


def test_a_converted_model_is_told_to_freeze_first() -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install float8_compile[onnx]")
    remedy = r"Linear.* scales .* run time.*freeze_for_inference\(model, calibration=.*convert_from_float8_training"
    model = nn.Sequential(f8.convert_to_float8_training(nn.Linear(K, N)), nn.GELU()).eval()
    with pytest.raises(TypeError, match=remedy):
        f8.export.onnx(model, (batch(),))
    with pytest.warns(UserWarning, match=remedy), pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(model, (batch(),), dynamo=True, verbose=False)


def test_an_older_opset_is_refused() -> None:
    frozen = f8.export.freeze_for_inference(mlp("tensorwise"), [batch()])
    with pytest.raises(ValueError, match="opset_version=18: QuantizeLinear gives float8 from 21 on"):
        f8.export.onnx(frozen, (batch(),), opset_version=18)


def test_without_the_extra_it_says_what_is_missing() -> None:
    code = """
        import torch, float8_compile as f8
        layer = f8.convert_to_float8_training(torch.nn.Linear(16, 16))
        frozen = f8.export.freeze_for_inference(layer, [torch.ones(1, 16)])
        try:
            f8.export.onnx(frozen, (torch.ones(1, 16),))
        except ImportError as error:
            print(error)
    """
    assert "float8_compile[onnx]" in run_python(code, blocked=("onnx", "onnxscript"))
