"""`scripts/gpu_check`: what it makes of parts that end well, badly, late or not at all; and two of them, in small."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cuda_graphs, preview_accuracy
from benchmarks.launch_pairs import ATTENTION, GEMM, OTHER, TRITON, Measured, Predicted, figures, role_of
from gpu_check_parts import __main__ as gpu_check
from gpu_check_parts.parts import TESTS, Part, parts
from gpu_check_parts.running import FAILED, NOT_RUN, OK, SKIPPED, TIMED_OUT, run

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


def part(code: str, limit: float = 60.0, name: str = "part", leaves: str = "part.json") -> Part:
    return Part(name, "a part", (sys.executable, "-c", code), limit, leaves)


def leaving(folder: Path, more: str = "") -> str:
    """A part's code that leaves its file, and then does more."""
    return f"open({str(folder / 'part.json')!r}, 'w').write('new'); print('done', flush=True); {more}"


@pytest.mark.parametrize(
    ("more", "limit", "status", "note"),
    [
        ("", 60, OK, ""),
        ("raise SystemExit(3)", 60, FAILED, "exit code 3"),
        ("import time; time.sleep(600)", 2, TIMED_OUT, "after 2 s"),
    ],
)
def test_a_part_is_ok_failed_or_timed_out(more: str, limit: float, status: str, note: str, tmp_path: Path) -> None:
    told: list[str] = []
    result = run(part(leaving(tmp_path, more), limit), limit, tmp_path, told.append)
    assert (result.status, result.note) == (status, note)
    assert result.tail[0] == told[0] == "done"
    assert (tmp_path / "part.log").read_text().startswith("done\n")


def test_a_part_that_leaves_nothing_has_failed_also_where_an_older_run_left_something(tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text("old")
    result = run(part("pass"), 60, tmp_path, lambda line: None)
    assert (result.status, result.note) == (FAILED, "left no part.json")


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import subprocess, sys, time; print({child}.pid, flush=True); time.sleep(600)"
    result = run(part(code), 3, tmp_path, lambda line: None)
    assert result.status == TIMED_OUT
    process = Path("/proc") / result.tail[0]

    def ended() -> bool:
        return not process.exists() or "Z" in (process / "stat").read_text().split()

    for _ in range(100):
        if not ended():
            time.sleep(0.1)
    assert ended()


def junit(folder: Path, **counts: int) -> str:
    """The code of tests that came to this."""
    attributes = " ".join(f"{key}='{number}'" for key, number in counts.items())
    report = f"<testsuites><testsuite {attributes}/></testsuites>"
    return f"open({str(folder / TESTS)!r} + '.xml', 'w').write({report!r})"


@pytest.mark.parametrize(
    ("counts", "status", "note"),
    [
        ({"tests": 5, "skipped": 5}, SKIPPED, "5 skipped"),
        ({"tests": 5, "skipped": 1}, OK, "4 passed, 1 skipped"),
        ({"tests": 0}, FAILED, ""),
    ],
)
def test_tests_that_are_all_skipped_have_not_passed(
    counts: dict[str, int], status: str, note: str, tmp_path: Path
) -> None:
    tests = part(junit(tmp_path, **counts), name=TESTS, leaves=f"{TESTS}.xml")
    result = run(tests, 60, tmp_path, lambda line: None)
    assert (result.status, result.note) == (status, note)


def made_of(monkeypatch: pytest.MonkeyPatch, *some: Part) -> None:
    monkeypatch.setattr(gpu_check, "parts", lambda folder, dry: list(some))


def test_the_summary_is_there_after_each_part_and_out_gets_a_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "here", tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    second = f"assert 'ok' in open({str(folder / 'summary.json')!r}).read(); open({str(folder / 'b.png')!r}, 'w')"
    made_of(
        monkeypatch,
        part(f"open({str(folder / 'a.json')!r}, 'w')", name="a", leaves="a.json"),
        part(second, name="b", leaves="b.png"),
    )
    assert gpu_check.main(["--dry-run", "--out", str(folder)]) == 0
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert [(each["name"], each["status"]) for each in found["parts"]] == [("a", OK), ("b", OK)]
    assert {"machine", "versions", "commit", "doctor"} <= set(found)
    assert sorted(path.name for path in out.iterdir()) == ["b.png", "gpu_check.tar.gz", "summary.json"]
    with tarfile.open(out / "gpu_check.tar.gz") as archive:
        assert {"gpu_check/a.json", "gpu_check/b.log"} <= set(archive.getnames())
    assert "ok" in capsys.readouterr().out


def test_one_failure_is_the_exit_code_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    good = f"open({str(tmp_path / 'b.json')!r}, 'w')"
    made_of(monkeypatch, part("raise SystemExit(1)", name="a"), part(good, name="b", leaves="b.json"))
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert [each["status"] for each in found] == [FAILED, OK]


def test_without_time_a_part_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    made_of(monkeypatch, part("raise SystemExit(1)"))
    assert gpu_check.main(["--dry-run", "--minutes", "0.1", "--out", str(tmp_path)]) == 1
    (found,) = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert (found["status"], found["note"]) == (NOT_RUN, "no time was left")


@no_gpu
def test_without_a_gpu_it_takes_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "torch sees no GPU here; --dry-run tries every part on the CPU" in capsys.readouterr().err


@no_gpu
def test_tests_on_the_gpu_are_skipped_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_check.main(["--dry-run", "--parts", TESTS, "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert found["status"] == SKIPPED


@no_gpu
@pytest.mark.usefixtures("afresh")
def test_without_a_gpu_the_graphs_benchmark_compares_what_there_is(tmp_path: Path) -> None:
    given = ["--contenders", "bf16", "delayed", "--rounds", "1", "--backend", "aot_eager", "--out", str(tmp_path)]
    assert cuda_graphs.main(given) == 0
    found = json.loads((tmp_path / "cuda_graphs.json").read_text())
    assert list(found["contenders"]["delayed"]) == ["eager", "compiled"]
    assert "A CPU has no CUDA graphs: this is a trial." in (tmp_path / "cuda_graphs.md").read_text()
    assert (tmp_path / "cuda_graphs.png").exists()


def test_a_way_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step_of(name: str, way: str, *_: Any) -> Any:
        if way == "compiled":
            raise RuntimeError("no graph\nfor this")
        return lambda: sum(range(10_000))

    monkeypatch.setattr(cuda_graphs, "step_of", step_of)
    assert cuda_graphs.main(["--contenders", "bf16", "--rounds", "1", "--out", str(tmp_path)]) == 1
    assert "* bf16, compiled: no graph\n" in (tmp_path / "cuda_graphs.md").read_text() + "\n"


def test_all_parts_together_have_about_ten_minutes(tmp_path: Path) -> None:
    for dry in (False, True):
        assert sum(each.limit for each in parts(tmp_path, dry)) <= 660
        assert len({each.name for each in parts(tmp_path, dry)}) == 6


# The preview, held against kernels


@pytest.mark.parametrize(
    ("kernel", "role"),
    [
        ("triton_red_fused__to_copy_abs_amax_0", TRITON),
        ("nvjet_qqtst_128x256_128x6_1x2_h_bz_coopA_algo2_NNT", GEMM),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<...>>", GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", GEMM),
        ("void pytorch_flash::flash_fwd_kernel<...>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", ATTENTION),
        ("void cublasLt::splitKreduce_kernel<...>", OTHER),
        ("void at::native::vectorized_elementwise_kernel<...>", OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel: str, role: str) -> None:
    assert role_of(kernel) == role


def test_launches_are_paired_by_name_and_the_libraries_in_order() -> None:
    preview = [
        Predicted("triton_a", TRITON, 8, 10, 1e-6),
        Predicted("aten.mm", GEMM, 8, 8, 2e-6),
        Predicted("triton_b", TRITON, 8, 8, 3e-6),
        Predicted("triton_a", TRITON, 8, 20, 4e-6),
        Predicted("aten.mm", GEMM, 8, 8, 5e-6),
    ]
    ran = [
        Measured("triton_a", TRITON, 2e-6),
        Measured("nvjet", GEMM, 3e-6),
        Measured("triton_c", TRITON, 4e-6),
        Measured("triton_a", TRITON, 5e-6),
        Measured("nvjet_2", GEMM, 6e-6),
    ]
    found = figures(preview, ran)
    pairs = [(pair["seconds"], pair["kernel"], pair["measured"]) for pair in found["pairs"]]
    assert pairs == [
        (1e-6, "triton_a", 2e-6),
        (4e-6, "triton_a", 5e-6),
        (2e-6, "nvjet", 3e-6),
        (5e-6, "nvjet_2", 6e-6),
    ]
    assert found["same names"] == 2
    assert found["roles"][TRITON]["predicted"] == found["roles"][TRITON]["ran"] == 3
    assert found["roles"][TRITON]["bytes in sectors"] == 38


@no_gpu
@pytest.mark.filterwarnings("ignore")
def test_the_preview_is_held_against_a_run_from_command_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_accuracy, "predicted", lambda *_: [Predicted("aten.mm", GEMM, 8, 8, 1e-6)] * 21)
    with torch.random.fork_rng():
        given = ["--contenders", "bf16", "--rounds", "2", "--backend", "aot_eager", "--out", str(tmp_path)]
        assert preview_accuracy.main(given) == 0
    torch._dynamo.reset()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]
    of = json.loads((tmp_path / "preview_accuracy.json").read_text())["recipes"]["bf16"]
    assert of["roles"][GEMM]["ran"] == 21, "seven linears, forward and twice backward"
    assert len(of["pairs"]) == 21
    assert "| bf16, GEMM | 21 | 21 |" in (tmp_path / "preview_accuracy.md").read_text()
