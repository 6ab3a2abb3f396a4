"""The command line, in this process: what it prints and writes, and one line for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fresh_process import run_python

from float8_compile import doctor, variants
from float8_compile.__main__ import UsageError, main
from float8_compile.doctor import Finding, examine
from float8_compile.machine import Gpu, Machine, look
from float8_compile.preview import summary

MODELS = '''
import torch
from torch import nn

NUMBER = 3

def build():
    """An MLP of 4096 tokens, 1024 features and 2048 between the layers."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).bfloat16()
    return model, (torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True),)

def small():
    return nn.Linear(32, 16), torch.randn(4, 32)

def nothing():
    pass

def no_model():
    return "model", ()

def no_arguments():
    return nn.Linear(16, 16), 3

def too_many():
    return nn.Linear(16, 16), (), {}, 4

def broken_build():
    return 1 / 0

def broken():
    return nn.Linear(16, 32), (torch.randn(4, 8),)
'''


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `my_models`, which can be imported from where the command runs."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_models", "needs_more"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> None:
    assert main(arguments) == 0


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "the following arguments are required: {preview,report,doctor}"),
        ("preveiw", "invalid choice: 'preveiw'"),
        ("preview", "the following arguments are required: build"),
        ("preview my_models", "'my_models': expected package.module:function, such as my_project.models:build"),
        ("preview my_models.py:build", "'my_models.py' is a file: name the module, my_models:build"),
        ("preview a/b.py:build", "'a/b.py' is a file: name the module, a.b:build"),
        ("preview no_models:build", "there is no module 'no_models': run this where"),
        ("preview no.models:build", "there is no module 'no.models': run this where"),
        ("preview needs_more:build", "No module named 'a_package_that_is_not_there'"),
        ("preview my_models:built", "module 'my_models' has no 'built': it has build, small, nothing"),
        ("preview my_models:NUMBER", "my_models:NUMBER is a int: expected a function without arguments"),
        ("preview my_models:build --recipe delaid", "unknown recipe 'delaid': there is bf16, torchao:tensorwise"),
        ("preview my_models:build --recipe bf16+keep", "unknown recipe 'bf16+keep'"),
        ("preview my_models:build --against torchao", "unknown recipe 'torchao'"),
        ("preview my_models:build --target H1000", "no target 'H1000'; there is H100"),
        ("preview my_models:build --json no/where.json", "no/where.json: there is no folder no"),
        ("preview my_models:nothing", "build() returned None: expected (model, args)"),
        ("preview my_models:no_model", "build() returned a str for a model: expected (model, args)"),
        ("preview my_models:no_arguments", "build() returned a int and a dict for arguments"),
        ("preview my_models:too_many", "build() returned a tuple of 4: expected (model, args)"),
        ("preview my_models:broken", "bf16: "),
        ("report my_models:broken_build", "bf16: ZeroDivisionError: division by zero"),
        ("report my_models:nothing", "build() returned None: expected (model, args)"),
        ("report my_models:build --recipe float8", "unknown recipe 'float8'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *progress, last = printed.err.splitlines()
    assert last.startswith("float8_compile: ")
    assert line in last
    assert all(each.endswith("...") for each in progress)


def test_a_mistake_in_the_model_can_be_traced() -> None:
    with pytest.raises(UsageError) as raised:
        main(["report", "my_models:broken_build", "--traceback"])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


# preview


def test_preview_side_by_side_and_then_the_first_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        *("preview", "my_models:build", "--recipe", "delayed", "--against", "tensorwise", "--against", "bf16"),
        *("--json", "a.json", "--plot", "a.png", "--code", "a.py"),
    )
    printed = capsys.readouterr()
    table, _, details = printed.out.partition("\n\n== delayed\n")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[2:]}
    assert list(rows) == ["delayed", "tensorwise", "bf16"]
    megabytes = {name: float(row[1]) for name, row in rows.items()}
    assert megabytes["bf16"] < megabytes["delayed"] < megabytes["tensorwise"]
    assert all(row[3] == "6" for row in rows.values()), "three GEMMs of two layers"
    assert details.startswith("H100, forward + backward: ")
    assert "for an amax alone" not in details, "that would be the first step of delayed scaling, not the steady state"
    assert "float8_compile: wrote a.json" in printed.err

    document = json.loads((tmp_path / "a.json").read_text())
    assert list(document["previews"]) == list(rows)
    totals = {name: found["totals"]["triton"] for name, found in document["previews"].items()}
    assert {name: str(total["count"]) for name, total in totals.items()} == {name: row[0] for name, row in rows.items()}
    assert "torch" in document
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    code = (tmp_path / "a.py").read_text()
    assert code.startswith("# delayed: forward\n")
    assert "# delayed: backward\n" in code
    compile(code, "a.py", "exec")


def test_a_recipe_that_keeps_weights(capsys: pytest.CaptureFixture[str]) -> None:
    run("preview", "my_models:build", "--recipe", "tensorwise+keep", "--against", "tensorwise")
    printed = capsys.readouterr().out
    kept, cast_again = (float(line.split()[6]) for line in printed.splitlines()[2:4])
    assert kept - cast_again == pytest.approx(2 * 1024 * 2048 / 1e6, abs=0.06)
    assert "cast in forward and again in backward" not in printed


def test_what_conversion_warns_of_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_models.py").write_text("import torch\nbuild = lambda: (torch.nn.ReLU(), (torch.ones(8),))\n")
    run("preview", "my_models:build", "--recipe", "tensorwise")
    assert "float8_compile: tensorwise: no layer was converted to float8" in capsys.readouterr().err


def test_all_launches_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(summary, "ROWS", 0)
    for more, folded in (((), True), (("--all",), False)):
        run("preview", "my_models:build", *more)
        assert ("smaller launches" in capsys.readouterr().out) == folded


# report


def test_report_of_a_model_as_it_was_built(capsys: pytest.CaptureFixture[str]) -> None:
    run("report", "my_models:build")
    printed = capsys.readouterr().out
    assert "never converted" in printed
    assert "0 of 2 linear layers run in float8" in printed


def test_report_of_a_recipe_with_what_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    run("report", "my_models:small", "--recipe", "tensorwise", "--saved")
    printed = capsys.readouterr().out
    assert "1 of 1 linear layers run in float8" in printed
    assert "eager" in printed
    assert "compiled" in printed


# doctor

LAPTOP = Machine(
    system="Linux", python="3.12.1", torch="2.13.0+cpu", built_for="CPU", triton="3.7.1", triton_wanted=None,
    torchao="0.18.0", gpus=(), driver=None, compiler="/usr/bin/g++", cpu="x86_64 with AVX512", cpu_gemm=9.7,
    graph_cache=True, precision_casts=True,
)  # fmt: skip
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30)
SERVER = replace(
    LAPTOP, torch="2.13.0+cu130", built_for="CUDA 13.0", triton_wanted="3.7.1", gpus=(H100,), driver="580.1"
)


def findings(machine: Machine, subject: str) -> list[Finding]:
    return [finding for finding in examine(machine) if finding.subject == subject]


def test_doctor_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor")
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"OK", "warn", "no"}
    assert str(torch.__version__) in lines[0]
    assert any("CPU float8 GEMM" in line and "runs" in line for line in lines)


def test_a_server_is_fine() -> None:
    statuses = {finding.subject: finding.status for finding in examine(SERVER)}
    assert statuses.pop("CPU float8 GEMM") == "warn"
    assert set(statuses.values()) == {"OK"}
    assert "NVIDIA H100 80GB HBM3, 9.0, 80 GiB, driver 580.1: float8 GEMMs" in findings(SERVER, "GPU")[0].text


@pytest.mark.parametrize(
    ("machine", "subject", "status", "says"),
    [
        (LAPTOP, "GPU", "no", "none: models train on the CPU, slowly -> `preview` shows what a GPU would run"),
        (LAPTOP, "triton", "OK", "3.7.1, fits torch"),
        (replace(LAPTOP, driver="580.1"), "GPU", "no", "but torch is a CPU build -> install the CUDA build"),
        (replace(SERVER, gpus=()), "GPU", "no", "can't use the GPU -> update the driver"),
        (replace(SERVER, gpus=(Gpu("A100", (8, 0), 2**36),)), "GPU", "no", "no float8 GEMM, which needs compute"),
        (replace(SERVER, gpus=(Gpu("L40S", (8, 9), 2**36),)), "GPU", "OK", "L40S, 8.9, 64 GiB"),
        (replace(SERVER, built_for="ROCm 6.4"), "GPU", "warn", "MI300 or newer"),
        (replace(LAPTOP, torch="2.9.1"), "torch", "no", "needs 2.11 or newer: pip install -U torch"),
        (replace(LAPTOP, torch="2.15.0"), "torch", "warn", "newer than 2.14"),
        (replace(LAPTOP, triton=None), "triton", "no", "there is no preview -> pip install 'triton==3.7.*'"),
        (replace(LAPTOP, triton=None, system="Windows"), "triton", "no", "Linux only"),
        (replace(LAPTOP, triton="3.8.0"), "triton", "warn", "3.8.0, but torch 2.13.0+cpu goes with 3.7"),
        (replace(SERVER, triton="3.7.0"), "triton", "warn", "goes with 3.7.1 -> pip install triton==3.7.1"),
        (replace(LAPTOP, torch="2.15.0", triton="3.9.0"), "triton", "warn", "isn't known here"),
        (replace(LAPTOP, triton=None), "preview", "no", "needs triton"),
        (replace(LAPTOP, torch="2.9.1"), "preview", "no", "a torch that was tried"),
        (replace(LAPTOP, torchao=None), "torchao", "warn", "pip install torchao"),
        (replace(LAPTOP, compiler=None), "C++ compiler", "no", "apt install g++, or name one in CXX"),
        (replace(LAPTOP, cpu_gemm="not implemented"), "CPU float8 GEMM", "no", "not implemented -> emulate=True"),
        (replace(LAPTOP, cpu_gemm=0.6), "CPU float8 GEMM", "OK", "0.60 of the time of bfloat16"),
        (replace(LAPTOP, graph_cache=False), "FX graph cache", "warn", "unset TORCHINDUCTOR_FX_GRAPH_CACHE"),
        (replace(LAPTOP, precision_casts=False), "known bug", "warn", "pytorch 150859"),
        (replace(LAPTOP, torch="2.14.1", triton="3.8.0"), "known bug", "warn", "triton 11111"),
    ],
)
def test_what_is_wrong_comes_with_its_remedy(machine: Machine, subject: str, status: str, says: str) -> None:
    [finding] = findings(machine, subject)
    assert finding.status == status
    assert says in str(finding)


def test_known_bugs_that_do_not_apply_are_not_listed() -> None:
    assert findings(LAPTOP, "known bug") == []


def test_it_looks_at_what_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (look().graph_cache, look().precision_casts) == (True, False)
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    machine = look()
    assert (machine.graph_cache, machine.precision_casts) == (False, True)
    assert machine.compiler != "no-such-compiler"


def test_doctor_works_without_triton_and_without_anything_optional() -> None:
    printed = run_python(
        "from float8_compile.__main__ import main; import sys; sys.exit(main(['doctor']))",
        blocked=("triton", "torchao", "rich", "matplotlib"),
    )
    assert len(printed.splitlines()) == len(doctor.doctor().splitlines())


def test_a_preview_without_triton_says_what_is_missing() -> None:
    printed = run_python(
        """
        import contextlib, io
        from float8_compile.__main__ import main
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["preview", "json:dumps"])
        print(code, errors.getvalue())
        """,
        blocked=("triton",),
    )
    assert (
        printed == "2 float8_compile: a preview needs triton, which is not installed: python -m float8_compile doctor"
    )


# Variants


def test_the_variants_are_the_recipes_and_torchaos() -> None:
    assert variants.names()[:4] == ("bf16", "torchao:tensorwise", "torchao:rowwise", "torchao:rowwise_with_gw_hp")
    assert set(variants.names()) > {"tensorwise", "rowwise", "delayed"}
    for name in ("delayed+keep", *variants.names()):
        assert variants.check(name) == name
