"""A preview as text and as a picture: figures counted by hand, long tables folded and nothing lost in the fold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from previews import BF16, CAST, E4M3, FP32, gemm, graph, kernel, launch, preview, reads, saved, writes

from float8_compile.preview import roles
from float8_compile.preview.picture import by_layer, plot, plot_comparison
from float8_compile.preview.result import Launch, Preview
from float8_compile.preview.summary import ROWS, compare, headline, text

MB = 10**6
PNG = b"\x89PNG\r\n\x1a\n"


def a_cast(size: int = 1000, name: str = "triton_poi_fused_mul_0", layers: tuple[str, ...] = ("up",)) -> Launch:
    """size x size elements: 2 bytes read and 1 written of each."""
    return launch(reads(BF16, (size, size)), writes(E4M3, (size, size)), name=name, layers=layers, ops=CAST)


def a_gemm(size: int = 1000) -> Launch:
    return gemm(reads(E4M3, (size, size)), reads(E4M3, (size, size)), writes(BF16, (size, size)))


def a_step() -> Preview:
    """Forward: a cast and its GEMM. Backward: a kernel of high precision, whose sectors are twice its bytes."""
    forward = graph(a_cast(), a_gemm(), saved=(saved(2 * MB), saved(2 * MB), saved(4, FP32)))
    wide = launch(reads(BF16, (1000, 1000), excess=2.0), writes(BF16, (1000, 1000), excess=2.0), layers=("", "down"))
    return preview(forward, graph(wide, phase="backward"))


# The headline


def test_the_headline_leads_with_bytes_in_sectors() -> None:
    first, second = headline(a_step()).splitlines()
    assert first == (
        "H100, forward + backward: 11.00 MB in sectors (7.00 MB) in 2 Triton kernels; 1 GEMM; at least 0.00 ms"
    )
    assert "32-byte sectors" in second
    assert "not a time" in second


def test_its_figures_are_the_sums_of_all_graphs() -> None:
    step = preview(*[graph(a_cast(10_000), a_gemm(10_000), phase=phase) for phase in ("forward", "backward")])
    line = headline(step).splitlines()[0]
    assert "0.60 GB in sectors (0.60 GB) in 2 Triton kernels; 2 GEMMs" in line
    seconds = 2 * 300 * MB / 3.352e12 + 2 * 2 * 10_000**3 / 1979e12
    assert f"at least {seconds * 1e3:.2f} ms" in line


def test_a_preview_of_nothing_is_said_to_be_one() -> None:
    assert headline(preview()).startswith(
        "H100, no graph: 0.00 MB in sectors (0.00 MB) in 0 Triton kernels; nothing else"
    )
    assert "Nothing that forward computes is kept" in text(preview())


# The tables


def table_after(lines: list[str], heading: str) -> list[str]:
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    return lines[start : lines.index("", start)]


def test_the_tables_of_a_step() -> None:
    lines = text(a_step()).splitlines()
    assert table_after(lines, "graph ") == [
        "graph     launches       count  MB in sectors     MB  TFLOP  at least ms",
        "--------  -------------  -----  -------------  -----  -----  -----------",
        "forward   Triton: cast       1           3.00   3.00   0.00        0.001",
        "forward   library: GEMM      1           4.00   4.00   0.00        0.001",
        "backward  Triton: other      1           8.00   4.00   0.00        0.001",
        "total                        3          15.00  11.00   0.00        0.003",
    ]
    assert table_after(lines, "forward  launch") == [
        "forward  launch                                  serves  dtypes        "
        "MB read  MB written  MB in sectors  at least us",
        "-------  --------------------------------------  ------  ------------  "
        "-------  ----------  -------------  -----------",
        "cast     poi_fused_mul_0                         up      bf16 -> e4m3  "
        "    2.0         1.0            3.0          0.9",
        "GEMM     aten._scaled_mm 1000x1000 -> 1000x1000  up      e4m3 -> bf16  "
        "    2.0         2.0            4.0          1.2",
    ]
    backward = table_after(lines, "backward  launch")
    assert backward[2].split() == [
        "other", "poi_fused_0", "(the", "model),", "down", "bf16", "->", "bf16", "2.0", "2.0", "8.0", "1.2",
    ]  # fmt: skip


def test_what_is_kept_and_by_whom_it_is_read() -> None:
    lines = text(a_step()).split("\n\n")
    kept = next(part for part in lines if part.startswith("kept for backward"))
    assert kept.splitlines()[2:] == [
        "bf16               2 of (1000000,)  up       4.0",
        "fp32               (1,)             up       0.0",
        "total                                        4.0",
    ]


def test_notes_are_printed_and_only_if_there_are_any() -> None:
    assert "Not modelled" not in text(a_step())
    assert text(preview(notes=("dropout: seeds are not counted",))).endswith(
        "Not modelled or not counted:\n* dropout: seeds are not counted"
    )


def test_a_graph_break_numbers_the_graphs() -> None:
    printed = text(preview(*[graph(a_cast())] * 2))
    assert (
        re.findall(r"^forward(?: \d)?(?=  (?:Triton|launch))", printed, re.MULTILINE) == ["forward 1", "forward 2"] * 2
    )


def test_what_compiled_kernels_use() -> None:
    kernels = {"triton_poi_fused_mul_0": kernel("triton_poi_fused_mul_0", 0, 24, None)}
    assert "compiled kernel" not in text(a_step())
    lines = text(preview(graph(a_cast(), kernels=kernels))).splitlines()
    assert table_after(lines, "compiled kernel") == [
        "compiled kernel  configs  registers  bytes spilled  bytes shared  float8 conversions",
        "---------------  -------  ---------  -------------  ------------  ------------------",
        "poi_fused_mul_0        2  32 to 56   0 to 24                1024                   2",
    ]


# Folding


def many(count: int) -> Preview:
    return preview(graph(*(a_cast(100 + number, f"triton_poi_fused_mul_{number}") for number in range(count))))


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.replace(",", "").split()[-4:]]


def test_a_long_list_is_folded_and_its_sum_stays() -> None:
    count = ROWS + 20
    folded = table_after(text(many(count)).splitlines(), "forward  launch")[2:]
    assert len(folded) == ROWS + 1
    assert "20 smaller launches" in folded[-1]
    unfolded = table_after(text(many(count), everything=True).splitlines(), "forward  launch")[2:]
    assert len(unfolded) == count
    for column in range(4):
        sums = [sum(numbers(line)[column] for line in lines) for lines in (folded, unfolded)]
        assert sums[0] == pytest.approx(sums[1], abs=0.05 * count)  # of rounded numbers


def test_the_largest_launches_stay_and_stay_in_order() -> None:
    shown = re.findall(r"poi_fused_mul_(\d+)", text(many(ROWS + 20)))
    assert list(map(int, shown)) == list(range(20, ROWS + 20))


def test_one_launch_alone_is_not_folded() -> None:
    assert "smaller" not in text(many(ROWS + 1))


def test_a_long_list_of_kept_tensors_is_folded_too() -> None:
    kept = tuple(saved(size * MB) for size in range(1, 12))
    step = preview(graph(a_cast(), saved=kept))
    assert "5 smaller ones" in text(step)
    assert "smaller ones" not in text(step, everything=True)
    for everything in (True, False):
        part = next(p for p in text(step, everything=everything).split("\n\n") if p.startswith("kept"))
        assert part.splitlines()[-1].split() == ["total", "66.0"]


# Names


@pytest.mark.parametrize(
    ("layers", "written"),
    [
        ((), ""),
        (("",), "(the model)"),
        (("attention.wq",), "attention.wq"),
        (("attention.wq", "attention.wk", "attention.wv"), "attention.wq, .wk, .wv"),
        (("attention.wq", "mlp.up", "mlp.down"), "attention.wq, mlp.up, .down"),
        (("a", "b", "c", "d", "e"), "a, b, c and 2 more"),
    ],
)
def test_names_of_layers(layers: tuple[str, ...], written: str) -> None:
    assert roles.layer_names(layers) == written


def test_a_long_name_keeps_both_ends() -> None:
    assert roles.shortened("triton_red_fused_a_b_c_d_e_17", 20) == "triton_red_fu…d_e_17"
    assert roles.shortened("short", 20) == "short"


@pytest.mark.parametrize(
    ("what", "role"),
    [
        (launch(reads(BF16, (64, 64)), writes(E4M3, (64, 64))), "cast"),
        (launch(reads(BF16, (64, 64)), writes(FP32, ()), ops=("aten.abs.default", "aten.amax.default")), "cast"),
        (launch(reads(BF16, (64, 64)), writes(FP32, ()), ops=("aten.abs.default", "aten.max.default")), "cast"),
        (launch(reads(BF16, (64, 64)), writes(FP32, ()), ops=("aten.max.default",)), "other"),
        (launch(reads(E4M3, (64, 64)), writes(BF16, (64, 64))), "other"),
        (
            launch(reads(BF16, (64, 64)), writes(BF16, (64, 64)), ops=("aten._flash_attention_backward.default",)),
            "other",
        ),
        (a_gemm(64), "GEMM"),
        (launch(name="aten._scaled_dot_product_flash_attention", kind="extern"), "attention"),
        (launch(name="triton_tem_fused_flex_attention_0"), "attention"),
        (launch(name="aten.sort.default", kind="aten"), "other"),
    ],
    ids=[
        "writes float8",
        "amax",
        "max of abs",
        "max",
        "reads float8",
        "beside attention",
        "GEMM",
        "flash",
        "flex",
        "op",
    ],
)
def test_what_a_launch_is_for(what: Launch, role: str) -> None:
    assert roles.role(what) == role


# Side by side


def test_two_side_by_side() -> None:
    assert compare([("bf16", preview(graph(a_gemm(10_000)))), ("delayed", a_step())]) == (
        "         Triton kernels  MB in sectors    MB  GEMMs  others  saved MB  at least ms\n"
        "-------  --------------  -------------  ----  -----  ------  --------  -----------\n"
        "bf16                  0           0.00  0.00      1       0       0.0         1.01\n"
        "delayed               2          11.00  7.00      1       0       4.0         0.00"
    )


# The picture


def test_a_launch_that_serves_several_layers_is_shared_among_them() -> None:
    bars = by_layer(a_step())
    assert bars == {
        "up": {("forward", "cast"): 3 * MB, ("forward", "GEMM"): 4 * MB},
        "(the model)": {("backward", "other"): 4 * MB},
        "down": {("backward", "other"): 4 * MB},
    }
    assert sum(sum(bar.values()) for bar in bars.values()) == a_step().total().sectors


def test_pictures_are_written(tmp_path: Path) -> None:
    many_layers = preview(graph(*(a_cast(layers=(f"blocks.{number}.mlp",)) for number in range(60))))
    for number, what in enumerate([a_step(), preview(), many_layers]):
        plot(what, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(PNG)
    plot_comparison([("a", a_step()), ("b", preview())], tmp_path / "c.svg", "title")
    assert "<svg" in (tmp_path / "c.svg").read_text()


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_a_picture_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'float8_compile\[train\]'"):
        plot(a_step(), tmp_path / "a.png")
