"""What a call costs eagerly, counted: ops, GEMMs, tensors that are kept. And the benchmark that measures it.

Nothing here is timed: a count says which change made a call dearer, and says it on a busy machine too.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8
from float8_compile.cast import cast
from float8_compile.recipe import FLOAT8_DTYPES
from float8_compile.variants import CACHED, KEEP, variant

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import eager_cost
from benchmarks.interleaved import interleaved, quantiles, ratio

M, K, N = 16, 48, 32  # different from each other, so that a shape says whose it is; multiples of 16: nothing to pad
TORCH = (2, 13)
GEMMS = ("_scaled_mm", "mm")
_TO_COPY = torch.ops.aten._to_copy.default

# "delayed" is as after a step; this one has seen none, so its scales are still dynamic
AT_FIRST = "delayed, at first"
VARIANTS = (*f8.Recipe.names(), AT_FIRST, *(recipe + KEEP for recipe in f8.Recipe.names()), f"tensorwise{CACHED}")

every_variant = pytest.mark.parametrize("name", VARIANTS)
pinned_torch = pytest.mark.skipif(
    not (TORCH <= torch.__version__ < (2, 14)),  # type: ignore[operator]
    reason=f"counted with torch 2.13; torch {torch.__version__} may have other ops behind one call",
)


def layer_of(name: str, bias: bool = False) -> nn.Linear:
    if name == AT_FIRST:
        return f8.Float8Linear(K, N, bias, dtype=torch.bfloat16, recipe="delayed")
    build = variant(lambda: (nn.Sequential(nn.Linear(K, N, bias, dtype=torch.bfloat16)), ()), name)
    return build()[0][0]  # type: ignore[no-any-return]


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(M, K, dtype=torch.bfloat16).requires_grad_(requires_grad)


class Ops(TorchDispatchMode):
    """Counts the ops that are called inside, and knows what tensors they made."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.casts = 0
        self._made: dict[StorageWeakRef, tuple[torch.dtype, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        self.casts += isinstance(result, Tensor) and func is _TO_COPY and result.dtype in FLOAT8_DTYPES
        given = {StorageWeakRef(t.untyped_storage()) for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and (ref := StorageWeakRef(result.untyped_storage())) not in given:
            self._made[ref] = result.dtype, tuple(result.shape)
        return result

    def alive(self, but: Tensor) -> Counter[tuple[torch.dtype, tuple[int, ...]]]:
        """Those that somebody still holds, except this one."""
        left_out = StorageWeakRef(but.untyped_storage())
        return Counter(what for ref, what in self._made.items() if ref != left_out and not ref.expired())

    @property
    def gemms(self) -> int:
        return sum(self.counts[name] for name in GEMMS)


def step(layer: nn.Linear, x: Tensor) -> tuple[Ops, Ops]:
    """The ops of forward, and of the backward for all gradients that are wanted."""
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    gradient = torch.randn(M, N, dtype=torch.bfloat16)
    with Ops() as forward:
        y = layer(x)
    with Ops() as backward:
        torch.autograd.grad(y, wanted, gradient)
    return forward, backward


# Tensors


@every_variant
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_no_float8_tensor_is_made_in_a_step(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, made, make = layer_of(name, bias), Counter[str](), f8.Float8Tensor.__new__

    def counting(cls: Any, *args: Any) -> f8.Float8Tensor:
        made["Float8Tensor"] += 1
        return make(cls, *args)

    monkeypatch.setattr(f8.Float8Tensor, "__new__", counting)
    step(layer, batch())
    with torch.no_grad():
        layer(batch())
    assert not made
    cast(batch(False), layer.recipe.output.left)  # type: ignore[union-attr]
    assert made, "and where one is made, this would notice"


def float8(*shape: int) -> tuple[torch.dtype, tuple[int, ...]]:
    return torch.float8_e4m3fn, shape


SCALE = (torch.float32, ())
ROWS = (torch.float32, (1, K))  # one scale for each column of the weight, as backward contracts it

# What forward makes and somebody holds until backward: float8 data, 1 / scale, and the scale of a weight that is cast
# again with it. What isn't here was there before: the input, the weight, the state of delayed scales.
KEPT = {
    "tensorwise": [float8(M, K), SCALE, SCALE, SCALE],
    "tensorwise+keep": [float8(M, K), SCALE, float8(K, N), SCALE],
    "tensorwise+cached": [float8(M, K), SCALE],
    "rowwise": [],
    "rowwise+keep": [float8(K, N), ROWS],
    "rowwise_with_gw_hp": [],
    "rowwise_with_gw_hp+keep": [float8(K, N), SCALE],
    "delayed": [float8(M, K)],
    "delayed+keep": [float8(M, K), float8(K, N)],
    AT_FIRST: [float8(M, K), SCALE, SCALE, SCALE],
}


@every_variant
def test_data_scale_and_its_reciprocal_is_all_that_is_kept_of_a_cast(name: str) -> None:
    layer, x = layer_of(name), batch()
    with Ops() as forward:
        y = layer(x)
    assert forward.alive(but=y) == Counter(KEPT[name])
    y.sum().backward()
    del y
    assert not forward.alive(but=x), "and nothing of it after backward"


# Ops


def ops(calls: str) -> Counter[str]:
    return Counter(calls.split())


QUANTIZE = ops("_to_copy mul clamp _to_copy")  # where nobody counts mul_, and clamp_ only under another's scale
BY_TENSOR = ops("abs max div clamp reciprocal") + QUANTIZE
POWER_OF_TWO = ops("view detach bitwise_and view detach minimum")  # torch detaches what it views as another dtype
BY_ROW = ops("abs amax _to_copy div clamp reciprocal") + POWER_OF_TWO + QUANTIZE
RECORD = ops("abs max") + ops("nan_to_num maximum _foreach_copy_")
BY_DELAYED = QUANTIZE + ops("sub add")  # under another's scale an infinity would saturate
AT_FIRST_SCALE = ops("div clamp gt where reciprocal")

OUTPUT = ops("t _scaled_mm")
GRAD_INPUT = ops("t clone t _scaled_mm")
GRAD_WEIGHT = ops("t t clone clone t _scaled_mm")
SIDE_BY_SIDE = ops("view unsqueeze view")  # the scales of rows or columns, put beside the result's
UNSCALED = ops("new_ones mul mul _to_copy")  # a GEMM of payloads that is scaled afterwards

TABLE = {
    "tensorwise": (
        BY_TENSOR + BY_TENSOR + OUTPUT,
        BY_TENSOR + QUANTIZE + GRAD_INPUT + GRAD_WEIGHT,
    ),
    "tensorwise+keep": (
        BY_TENSOR + BY_TENSOR + OUTPUT + ops("t clone t"),
        BY_TENSOR + GRAD_INPUT - ops("clone") + GRAD_WEIGHT,
    ),
    "tensorwise+cached": (
        BY_TENSOR + OUTPUT,
        BY_TENSOR + GRAD_INPUT + GRAD_WEIGHT,
    ),
    "delayed": (
        RECORD + BY_DELAYED + BY_DELAYED + OUTPUT,
        RECORD + BY_DELAYED + BY_DELAYED + GRAD_INPUT + GRAD_WEIGHT,
    ),
    AT_FIRST: (
        RECORD + BY_DELAYED + AT_FIRST_SCALE + ops("abs max") + BY_DELAYED + AT_FIRST_SCALE + OUTPUT,
        RECORD + BY_DELAYED + AT_FIRST_SCALE + BY_DELAYED + GRAD_INPUT + GRAD_WEIGHT,
    ),
    "rowwise": (
        BY_ROW + BY_ROW + SIDE_BY_SIDE + OUTPUT,
        BY_ROW + BY_ROW + SIDE_BY_SIDE + ops("t") + GRAD_INPUT + UNSCALED
        + BY_ROW + BY_ROW + SIDE_BY_SIDE + ops("t t") + GRAD_WEIGHT + UNSCALED,
    ),
    "rowwise_with_gw_hp": (
        BY_ROW + BY_ROW + SIDE_BY_SIDE + OUTPUT,
        BY_ROW + BY_TENSOR + POWER_OF_TWO + ops("view unsqueeze") + GRAD_INPUT + UNSCALED + ops("t t t mm"),
    ),
}  # fmt: skip


@pinned_torch
@pytest.mark.parametrize("name", TABLE)
def test_the_ops_of_a_step(name: str) -> None:
    forward, backward = step(layer_of(name), batch())
    of_forward, of_backward = TABLE[name]
    assert forward.counts == of_forward
    assert backward.counts == of_backward


@pinned_torch
def test_a_bias_is_added_once_and_its_gradient_summed_once() -> None:
    plain, with_bias = (step(layer_of("tensorwise", bias), batch()) for bias in (False, True))
    added = [more.counts - less.counts for more, less in zip(with_bias, plain, strict=True)]
    assert added == [ops("add"), ops("sum _to_copy")]


# Casts to float8 of a step: with both gradients wanted, the input's alone (a frozen weight), the weight's alone.
CASTS = {
    "tensorwise": (4, 4, 3),
    "tensorwise+keep": (3, 3, 3),
    "tensorwise+cached": (2, 2, 2),
    "rowwise": (6, 4, 4),
    "rowwise+keep": (6, 4, 4),
    "rowwise_with_gw_hp": (4, 4, 2),
    "rowwise_with_gw_hp+keep": (4, 4, 2),
    "delayed": (4, 4, 3),
    "delayed+keep": (3, 3, 3),
    AT_FIRST: (4, 4, 3),
}


@every_variant
def test_a_gradient_that_nobody_wants_costs_no_gemm_and_no_cast(name: str) -> None:
    found = []
    for x_wanted, w_wanted in ((True, True), (True, False), (False, True)):
        layer = layer_of(name)
        layer.weight.requires_grad_(w_wanted)
        forward, backward = step(layer, batch(x_wanted))
        found.append((forward.gemms + backward.gemms, forward.casts + backward.casts))
    assert found == list(zip((3, 2, 2), CASTS[name], strict=True))


# The benchmark


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = eager_cost.main([*arguments, "--rounds", "2", "--out", str(tmp_path)])
    return code, json.loads((tmp_path / "eager_cost.json").read_text())


def test_it_leaves_a_table_numbers_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    code, document = run(tmp_path, "--sizes", "64", "--no-compile")
    assert (code, torch.get_num_threads()) == (0, threads)
    assert document["command"].startswith("python -m benchmarks.eager_cost --sizes 64 --no-compile")
    assert document["versions"]["torch"] == torch.__version__
    assert (document["rounds"], document["tokens"], document["unit"]) == (2, 16, "us a call")
    measured = document["sizes"]["64"]
    assert list(measured) == ["eager"]
    for part in ("forward", "forward + backward"):
        assert list(measured["eager"][part]) == [eager_cost.GEMMS, *eager_cost.CONTENDERS]
        for entry in measured["eager"][part].values():
            assert 0 < entry["p5"] <= entry["p25"] <= entry["median"] <= entry["p75"] <= entry["p95"]
    assert measured["eager"]["forward"]["delayed"]["against"] == "torchao:tensorwise"
    assert "against" not in measured["eager"]["forward"]["torchao:tensorwise"]
    table = (tmp_path / "eager_cost.md").read_text()
    for start in ("eager, forward", "eager, forward + backward", "bf16", "torchao:rowwise", "tensorwise+cached"):
        assert re.search(rf"^\| {re.escape(start)} \| [\d,]+ \|$", table, re.MULTILINE), start
    assert re.search(r"^\| delayed, eager, forward \| \d+\.\d\d \|$", table, re.MULTILINE)
    assert (tmp_path / "eager_cost.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.startswith("64: eager, forward + backward, us: bf16 ")
    assert printed.splitlines()[-1].endswith("eager_cost.json, .md, .png")


def test_compiled_layers_stand_beside_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    compiled: list[Any] = []

    def compile(function: Callable[..., Any], **options: Any) -> Any:
        compiled.append(options)
        return torch_compile(function, **options | {"backend": "aot_eager"})

    torch_compile: Any = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    code, document = run(tmp_path, "--sizes", "64", "32", "--contenders", "bf16", "delayed", "delayed")
    assert code == 0
    assert compiled == 4 * [{"fullgraph": True, "dynamic": False, "backend": "inductor"}]
    assert list(document["sizes"]) == ["64", "32"]
    for measured in document["sizes"].values():
        assert list(measured) == ["eager", "compiled"]
        assert list(measured["compiled"]["forward"]) == ["bf16", "delayed"]
    assert "| compiled, forward + backward | 64 | 32 |" in (tmp_path / "eager_cost.md").read_text()


def test_what_is_done_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def stopped(size: int, *others: Any) -> dict[Any, Any]:
        sizes.append(size)
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return {("eager", part, name): int for part in eager_cost.PASSES for name in (eager_cost.GEMMS, "bf16")}

    monkeypatch.setattr(eager_cost, "cases", stopped)
    code, document = run(tmp_path, "--sizes", "128", "64", "256")
    assert (code, sizes, list(document["sizes"])) == (130, [128, 64], ["128"])
    assert "stopped" in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"], "and nothing unfinished"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "bf16", "delaid"], "unknown recipe 'delaid'"),
        (["--sizes", "60"], "60 is no positive multiple of 16"),
        (["--rounds", "0"], "0 is less than 1"),
    ],
)
def test_what_it_cannot_measure_is_refused_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        eager_cost.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in eager_cost.CONTENDERS if name != eager_cost.AS_BUILT])
def test_every_contender_is_what_its_name_says(name: str) -> None:
    layer, _ = eager_cost.layer_and_input(name, 32, "cpu")
    assert type(layer).__module__.startswith("torchao" if name.startswith("torchao:") else "float8_compile")


# Timing in turns


def test_each_contender_has_one_sample_a_round() -> None:
    now, called, rounds = 0.0, Counter[str](), []

    def clock() -> float:
        return now

    def taking(seconds: float, name: str) -> Callable[[], None]:
        def contender() -> None:
            nonlocal now
            now += seconds
            called[name] += 1

        return contender

    def after_round(done: int) -> None:
        nonlocal now
        now += 100.0  # and nobody pays for it
        rounds.append(done)

    samples = interleaved(
        {"short": taking(2**-7, "short"), "long": taking(2.0, "long")},
        rounds=5,
        clock=clock,
        at_least=2**-5,
        after_round=after_round,
    )
    assert samples == {"short": [2**-7] * 5, "long": [2.0] * 5}
    assert rounds == [1, 2, 3, 4, 5]
    assert called["long"] == 3 + 3 + 5  # warm up, find out how long it takes, and a call for each sample
    assert called["short"] == 3 + 3 + 5 * (1 + 4)  # of one that doesn't count, and as many as last long enough


def test_the_order_changes_from_round_to_round() -> None:
    orders: list[list[str]] = [[]]
    samples = interleaved(
        {name: lambda name=name: orders[-1].append(name) for name in "abc"},  # type: ignore[misc]
        rounds=20,
        at_least=0.0,
        after_round=lambda done: orders.append([]),
    )
    assert list(samples) == ["a", "b", "c"]
    of_rounds = [tuple(dict.fromkeys(order)) for order in orders[1:-1]]  # the first round's come after the warm-up
    assert {tuple(sorted(order)) for order in of_rounds} == {("a", "b", "c")}
    assert len(set(of_rounds)) > 3


def test_on_a_gpu_its_own_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
    assert interleaved({"a": lambda: log.append("call")}, rounds=1, device="cuda:0") == {"a": [2.0]}
    assert log[-5:] == ["idle", "record", "call", "record", "wait"]


def test_quantiles_and_ratios() -> None:
    assert quantiles([float(n) for n in range(101)]) == {"p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95}
    assert set(quantiles([3.0]).values()) == {3.0}
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 3.0]) == 0.5
