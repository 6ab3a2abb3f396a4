"""The benchmark of single layers from its command to its files: bytes and calls by hand, times only for being there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8_compile as f8
from float8_compile.variants import variant

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import launches, linear
from benchmarks.contenders import counterpart
from benchmarks.launches import calls_in, launches_of
from benchmarks.linear_table import Layer, Row, figures, in_words
from benchmarks.saved import saved_bytes

BACKEND = "aot_eager_decomp_partition"  # what is kept for backward is chosen as in any graph, without a C++ compiler
CONTENDERS = ("nn.Linear", "torchao:tensorwise", "tensorwise", "tensorwise+keep", "rowwise", "delayed", "delayed+keep")
M, K, N = 256, 512, 128  # of 8b-kv on a CPU

pytestmark = pytest.mark.xdist_group("linear")  # all read one run


def arguments(folder: Path, *others: str) -> list[str]:
    return ["--shapes", "8b-kv", "--backend", BACKEND, "--rounds", "2", "--out", str(folder), *others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run has left."""
    if torch.cuda.is_available():
        pytest.skip("shapes are larger on a GPU")
    folder = tmp_path_factory.mktemp("linear")
    torch._dynamo.reset()
    with torch.random.fork_rng():
        assert linear.main(arguments(folder, "--contenders", *CONTENDERS)) == 0
    yield folder
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def layers(folder: Path) -> list[dict[str, Any]]:
    """One for each dtype."""
    return json.loads((folder / "linear.json").read_text())["layers"]  # type: ignore[no-any-return]


def test_it_leaves_tables_numbers_and_a_picture(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["linear.json", "linear.md", "linear.png"]
    document = json.loads((folder / "linear.json").read_text())
    assert document["command"].startswith("python -m benchmarks.linear --shapes 8b-kv --backend aot")
    assert document["versions"]["torch"] == torch.__version__
    assert (document["rounds"], document["tokens"], document["device"]) == (2, M, "cpu")
    assert [(of["dtype"], of["shape"], of["K"], of["N"]) for of in document["layers"]] == [
        ("bf16", "8b-kv", K, N),
        ("fp16", "8b-kv", K, N),
    ]
    for layer in document["layers"]:
        assert tuple(layer["contenders"]) == CONTENDERS
        for row in layer["contenders"].values():
            assert 0 < row["p5"] <= row["p25"] <= row["median"] <= row["p75"] <= row["p95"]
            assert row["kernels"] is None, "which only Inductor's code tells"
    assert (folder / "linear.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_say_what_the_numbers_are(folder: Path, layers: list[dict[str, Any]]) -> None:
    text = (folder / "linear.md").read_text()
    assert "bf16, 8b-kv: 512 x 128\n" in text
    assert "Kernels are not counted" in text
    for layer in layers:
        for name, row in layer["contenders"].items():
            assert f"| {name} | {' | '.join(in_words(row).values())} |\n" in text


def test_what_is_saved(layers: list[dict[str, Any]]) -> None:
    scale = 4
    for layer in layers:
        saved = {name: row["saved"] for name, row in layer["contenders"].items()}
        assert saved["nn.Linear"] == 2 * M * K, "the input as it is"
        assert saved["tensorwise"] == M * K + 3 * scale
        assert saved["tensorwise+keep"] == saved["tensorwise"] + N * K - scale, "to cast it again takes its scale"
        assert saved["delayed"] == M * K, "scales are the layer's own"
        assert saved["delayed+keep"] == saved["delayed"] + N * K
        assert saved["rowwise"] < saved["nn.Linear"]


def test_speed_ups_are_medians_of_the_rounds_ratios() -> None:
    rows = {
        "nn.Linear": Row([4.0, 40.0, 4.0], 0, None),
        "torchao:tensorwise": Row([3.0, 30.0, 8.0], 0, 7),
        "delayed": Row([2.0, 20.0, 2.0], 12_345, 5),
    }
    found = figures(rows, "delayed")
    assert (found["over nn.Linear"], found["over torchao"], found["median"]) == (2.0, 1.5, 2e6)
    assert in_words(found) == {
        "us": "2,000,000",
        "quartiles": "2,000,000 to 11,000,000",
        "over nn.Linear": "2.00",
        "over torchao": "1.50",
        "saved, kB": "12.3",
        "kernels": "5",
    }
    assert figures(rows, "torchao:tensorwise")["over torchao"] is None
    assert figures(rows, "nn.Linear")["over nn.Linear"] is None
    assert figures({"delayed": rows["delayed"]}, "delayed")["over nn.Linear"] is None


def test_torchaos_counterparts() -> None:
    assert counterpart("rowwise_with_gw_hp+keep") == "torchao:rowwise_with_gw_hp"
    assert counterpart("delayed+keep+cached") == "torchao:tensorwise"
    assert [counterpart(name) for name in ("bf16", "nn.Linear", "torchao:rowwise")] == [None] * 3


def test_all_recipes_are_measured_casting_again_and_keeping() -> None:
    assert {name for recipe in f8.Recipe.names() for name in (recipe, f"{recipe}+keep")} < set(linear.CONTENDERS)
    assert set(linear.ON_A_CPU) < set(linear.SHAPES)
    assert all(k % 128 == n % 128 == 0 for k, n in linear.SHAPES.values()), "an eighth is a multiple of 16"


# What is counted


def test_a_state_and_a_cache_were_there_before() -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)

    def saved(name: str) -> int:
        build = variant(lambda: (nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16)), ()), name)
        layer = build()[0][0]
        return saved_bytes(lambda: layer(x), x)

    assert saved("delayed") == M * K
    assert saved("tensorwise+cached") == M * K + 4, "the input's scale"


def test_a_storage_counts_once_and_an_input_only_where_it_is_kept() -> None:
    x = torch.randn(8, requires_grad=True)
    assert saved_bytes(lambda: x * x, x) == 32
    assert saved_bytes(lambda: x + x, x) == 0
    assert saved_bytes(lambda: x.exp().square(), x) == 32, "the same tensor, for both"


CODE = """
cpp_fused_abs_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in, float* out) { ... }
''')

def call(self, args):
    # Topologically Sorted Source Nodes: [y], Original ATen: torch.ops.aten.mm.default(
    buf0 = empty_strided_cpu((16, 16), (16, 1), torch.float32)
    cpp_fused_abs_0(arg0, buf0)
    extern_kernels._scaled_mm(buf0, buf1, out=buf2)
    buf3 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf2)
    return (buf3, )
"""


def test_calls_of_generated_and_of_library_functions_are_counted() -> None:
    assert calls_in(CODE) == 3


@pytest.mark.usefixtures("afresh")
def test_inductors_code_for_a_linear_is_three_gemms() -> None:
    layer = nn.Linear(K, N, bias=False)
    x = torch.randn(M, K, requires_grad=True)
    run: Callable[[Tensor], Tensor] = torch.compile(layer)
    count = [launches_of(lambda: run(x).sum().backward(), False, by_inductor) for by_inductor in (True, False)]
    assert count == [3, None]


def test_on_a_gpu_kernels_are_counted_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    events = [{"cat": "kernel"}, {"cat": "gpu_memcpy"}, {"cat": "kernel"}, {"cat": "cpu_op"}, {"ph": "M"}]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launches, "profile", lambda activities: pytest.MonkeyPatch.context())
    monkeypatch.setattr(launches, "events_of", lambda profiler: events)
    assert launches_of(lambda: steps.append("step"), True, False) == 2
    assert len(steps) == 2, "one to compile, one that is watched"


# The command


def test_what_is_done_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(dtype: str, shape: str, *others: Any) -> Layer:
        if dtype == "fp16":
            raise KeyboardInterrupt
        return Layer(dtype, shape, K, N, {"nn.Linear": Row([1e-3], 1000, 3), "delayed": Row([2e-3], 500, 9)})

    monkeypatch.setattr(linear, "measure", measure)
    assert linear.main(arguments(tmp_path)) == 130
    assert "| delayed | 2,000 | 2,000 to 2,000 | 0.50 | - | 0.5 | 9 |" in (tmp_path / "linear.md").read_text()
    (layer,) = json.loads((tmp_path / "linear.json").read_text())["layers"]
    assert layer["contenders"]["delayed"]["over nn.Linear"] == 0.5
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"], "and nothing unfinished"
    printed = capsys.readouterr()
    assert printed.err == "stopped\n"
    assert re.match(r"bf16, 8b-kv: 512 x 128, us: nn\.Linear 1,000, delayed 2,000\n", printed.out)


@pytest.mark.usefixtures("afresh")
def test_a_contender_that_fails_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = linear.prepared

    def failing(name: str, *others: Any) -> Any:
        if name == "rowwise":
            raise RuntimeError("Only bf16 results\nand more")
        return prepared(name, *others)

    monkeypatch.setattr(linear, "prepared", failing)
    assert linear.main(arguments(tmp_path, "--dtypes", "fp16", "--contenders", "rowwise", "nn.Linear")) == 0
    (layer,) = json.loads((tmp_path / "linear.json").read_text())["layers"]
    assert list(layer["contenders"]) == ["nn.Linear"]
    assert layer["failed"] == {"rowwise": "RuntimeError: Only bf16 results"}
    assert "\nrowwise failed: RuntimeError: Only bf16 results\n" in (tmp_path / "linear.md").read_text()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--contenders", "nn.Linear", "delaid"], "unknown recipe 'delaid'"),
        (["--shapes", "w14"], "invalid choice: 'w14'"),
        (["--dtypes", "fp32"], "invalid choice: 'fp32'"),
        (["--rounds", "0"], "0 is less than 1"),
    ],
)
def test_what_it_cannot_measure_is_refused_in_a_line(
    others: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        linear.main(arguments(tmp_path, *others))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
