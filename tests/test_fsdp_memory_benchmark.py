"""The FSDP2 benchmark from its command to its files, with a tiny model, whose bytes can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_python
from torch import nn

from benchmarks.deit import SHAPES, Deit

BLOCKS, RANKS = 2, 4
CONTENDERS = ("bf16", "tensorwise", "tensorwise+gather", "tensorwise+keep+gather", "rowwise+gather")
MODEL = Deit(SHAPES["tiny"])
LINEARS = [m for block in list(MODEL.blocks)[:BLOCKS] for m in block.modules() if isinstance(m, nn.Linear)]
WEIGHTS = sum(linear.weight.numel() for linear in LINEARS)
ROWS = sum(linear.out_features for linear in LINEARS)


pytestmark = pytest.mark.xdist_group("fsdp_memory")  # all read one run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By contender. In a process of its own, since the process group is the process's."""
    folder = tmp_path_factory.mktemp("fsdp_memory")
    options = ["--model", "tiny", "--blocks", str(BLOCKS), "--ranks", str(RANKS), "--out", str(folder)]
    arguments = [*options, "--backend", "aot_eager_decomp_partition", "--contenders", *CONTENDERS]
    root = str(Path(__file__).resolve().parents[1])
    run_python(
        f"import sys, warnings; warnings.simplefilter('ignore'); sys.path.append({root!r})\n"
        f"from benchmarks.fsdp_memory import main; sys.exit(main({arguments!r}))"
    )
    assert sorted(path.name for path in folder.iterdir()) == [f"fsdp_memory.{end}" for end in ("json", "md", "png")]
    return json.loads((folder / "fsdp_memory.json").read_text())["contenders"]  # type: ignore[no-any-return]


def test_a_float8_all_gather_sends_half_of_the_weights_bytes(rows: dict[str, dict[str, Any]]) -> None:
    """Twice a step, in forward and in backward, an element is a byte less; rows send their scales along."""
    plain = rows["bf16"]["sent"]
    assert rows["tensorwise"]["sent"] == plain
    assert plain - rows["tensorwise+gather"]["sent"] == 2 * WEIGHTS // RANKS
    assert plain - rows["rowwise+gather"]["sent"] == 2 * (WEIGHTS - 4 * ROWS) // RANKS


def test_a_kept_weight_is_one_byte_an_element_and_another_none(rows: dict[str, dict[str, Any]]) -> None:
    kept = rows["tensorwise+keep+gather"]["forward"] - rows["tensorwise+gather"]["forward"]
    assert kept == WEIGHTS
    scales = 2 * 4 * len(LINEARS)  # of a gathered weight they are the layer's own, and not kept for backward
    assert rows["tensorwise"]["forward"] - rows["tensorwise+gather"]["forward"] == scales


def test_times_are_left_out_where_there_are_no_gpus(rows: dict[str, dict[str, Any]]) -> None:
    assert {row["steps"] for row in rows.values()} == {None}
