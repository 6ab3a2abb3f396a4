"""Which layers are left out, and the reason in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchao.float8 import Float8LinearRecipeName
from torchao.float8 import _auto_filter_for_recipe as torchao_filter
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from float8_compile import Cast, Float8Linear, Gemm, Recipe, auto_filter
from float8_compile.filters import missing_gpu_support, obstacle


class LoRALinear(nn.Linear):
    pass


def linear(n: int = 64, k: int = 64) -> nn.Linear:
    return nn.Linear(k, n, bias=False, device="meta")


def with_forward_of_its_own() -> nn.Linear:
    layer = linear()
    layer.forward = lambda x: x
    return layer


def quantized() -> nn.Linear:
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    return model[0]


# What conversion can't touch


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: LoRALinear(8, 8), "LoRALinear is a subclass of nn.Linear with a behaviour of its own"),
        (lambda: nn.LazyLinear(8), "LazyLinear has no weight yet"),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "ParametrizedLinear is a subclass of nn.Linear"),
        (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8), "nn.MultiheadAttention reads its weight"),
        (lambda: nn.MultiheadAttention(8, 2).out_proj, "nn.MultiheadAttention reads its weight"),
        (with_forward_of_its_own, "its forward was replaced on the instance"),
        (lambda: nn.Linear(8, 8, dtype=torch.float64), "its weight is torch.float64, not bfloat16, float16 or float32"),
        (lambda: nn.Linear(8, 8).to(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn"),
        (quantized, "its weight is torchao's Int8Tensor"),
    ],
)
def test_an_obstacle_is_named(build: Callable[[], nn.Linear], reason: str) -> None:
    assert (obstacle(build()) or "").startswith(reason)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(8, 8),
        lambda: nn.Linear(7, 3, bias=False, device="meta", dtype=torch.bfloat16),
        lambda: nn.Linear(8, 8, dtype=torch.float16),
        lambda: nn.Linear(8, 8).requires_grad_(False).eval(),
        lambda: Float8Linear(8, 8),
    ],
)
def test_a_plain_linear_is_no_obstacle(build: Callable[[], nn.Linear]) -> None:
    assert obstacle(build()) is None


# What would not gain

SIZES = (16, 24, 512, 1024, 1040, 2048, 2064, 4096, 4112, 8192)  # each side of torchao's thresholds


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_decisions_are_torchaos(recipe: str) -> None:
    ours, theirs = auto_filter(recipe, skip=["head"]), torchao_filter(recipe, ["head"])
    for n, k, fqn in product(SIZES, SIZES, ["mlp.up", "head"]):
        assert ours(linear(n, k), fqn) == theirs(linear(n, k), fqn), (n, k, fqn)


def test_a_recipe_that_torchao_has_no_thresholds_for_goes_by_its_output() -> None:
    assert auto_filter("rowwise_with_gw_hp") == auto_filter("rowwise")


@pytest.mark.parametrize(
    ("recipe", "n", "k", "reason"),
    [
        ("tensorwise", 8192, 8192, None),
        ("tensorwise", 1024, 4096, "too small to gain (N <= 1024 and K <= 4096: casts cost more than the GEMM saves)"),
        ("tensorwise", 1000, 8192, "K=8192, N=1000: not multiples of 16, so each GEMM would be padded"),
        ("rowwise", 2048, 8192, "too small to gain (N <= 2048: casts cost more than the GEMM saves)"),
        ("rowwise", 8192, 1024, "too small to gain (K <= 1024: casts cost more than the GEMM saves)"),
        ("rowwise", 4096, 2048, "too small to gain (N <= 4096 and K <= 2048: casts cost more than the GEMM saves)"),
    ],
)
def test_the_reason_is_in_words(recipe: str, n: int, k: int, reason: str | None) -> None:
    assert auto_filter(recipe).reason(linear(n, k), "up") == reason


def test_a_skipped_name_is_the_reason() -> None:
    chosen = auto_filter("tensorwise", skip=("gate", "head"))
    assert chosen.reason(linear(8192, 8192), "model.lm_head") == "skipped by name ('head')"
    assert not chosen(linear(8192, 8192), "model.lm_head")


def test_other_modules_are_left_out() -> None:
    assert not auto_filter("tensorwise")(nn.Embedding(8192, 8192, device="meta"), "embedding")


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe.from_name("rowwise"),
        "rowwise",
        "ROWWISE",
        Float8LinearRecipeName.ROWWISE,
        Recipe(*[Gemm(Cast(granularity="row"), Cast(granularity="row"))] * 3),
    ],
)
def test_a_recipe_is_understood_in_any_form(recipe: object) -> None:
    assert auto_filter(recipe) == auto_filter("rowwise")


def test_names_that_match_nothing_are_found() -> None:
    chosen = auto_filter("tensorwise", skip=["head", "mlp.upp", "embed"])
    assert chosen.unused(["blocks.0.mlp.up", "lm_head"]) == ("mlp.upp", "embed")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip": "head"}, TypeError, r"skip='head'\): expected a list of names, such as \['head'\]"),
        ({"device": "B200"}, ValueError, r"device='B200'\): measured are H100, H200; .*write a module_filter_fn"),
        ({"recipe": "rowwize"}, ValueError, "unknown recipe 'rowwize': the recipes are tensorwise, rowwise"),
    ],
)
def test_a_bad_argument_is_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto_filter(**{"recipe": "tensorwise", **arguments})


# What the GPU can do


def on_cuda() -> torch.device:
    """A GPU, which the machine need not have."""
    return torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize(
    ("name", "capability"), [("L4", (8, 9)), ("H100", (9, 0)), ("B200", (10, 0)), ("RTX 5090", (12, 0))]
)
def test_a_gpu_with_float8_gemms_is_fine(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]
) -> None:
    gpu(monkeypatch, name, capability)
    assert missing_gpu_support(on_cuda(), Recipe.from_name("tensorwise")) is None


def test_an_older_gpu_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    missing = missing_gpu_support(on_cuda(), Recipe.from_name("tensorwise"))
    assert missing == "NVIDIA A100-SXM4-80GB (compute capability 8.0) has no float8 GEMM, which needs 8.9 or newer"


def test_emulation_needs_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert missing_gpu_support(on_cuda(), replace(Recipe.from_name("tensorwise"), emulate=True)) is None


def test_a_recipe_without_float8_gemms_needs_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    high_precision = Gemm(Cast(None), Cast(None))
    assert missing_gpu_support(on_cuda(), Recipe(*[high_precision] * 3)) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_elsewhere_asks_no_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked"))
    assert missing_gpu_support(torch.device(device), Recipe.from_name("tensorwise")) is None
