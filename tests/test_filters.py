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
from float8_compile.filters import LEAST_GAIN, missing_gpu_support, obstacle
from float8_compile.roofline import bf16_step, float8_step
from float8_compile.targets import TARGETS


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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", Recipe.names())
def test_a_layer_stays_out_where_its_estimate_is_below_a_tenth_more(recipe: str, target: str) -> None:
    chosen, how, gpu = auto_filter(recipe, device=target), Recipe.from_name(recipe), TARGETS[target]
    decisions = set()
    for n, k in product((16, 512, 1024, 4096, 8192), repeat=2):
        gain = bf16_step(8192, k, n, gpu).seconds / float8_step(8192, k, n, gpu, how).seconds
        assert chosen(linear(n, k), "up") == (gain >= LEAST_GAIN)
        decisions.add(chosen(linear(n, k), "up"))
    assert decisions == {True, False}


LLAMA_3_8B = {"q, o": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096)}
LLAMA_2_70B = {"wqkv": (8192, 1280), "w0": (1024, 8192), "w13": (8192, 7168), "w2": (3584, 8192)}  # on 8 GPUs


@pytest.mark.parametrize(
    ("recipe", "left_out", "torchao_leaves_out"),
    [
        ("tensorwise", [], ["k, v"]),
        ("rowwise", ["k, v", "w0"], ["k, v", "wqkv", "w0"]),
        ("rowwise_with_gw_hp", ["w0"], None),
        ("delayed", [], None),
    ],
)
def test_of_llama_it_leaves_out_what_torchao_does_or_less(
    recipe: str, left_out: list[str], torchao_leaves_out: list[str] | None
) -> None:
    """With the 16384 tokens of torchao's measurements, which are its thresholds. It has none for the others."""

    def without(chosen: Callable[[nn.Module, str], bool]) -> list[str]:
        return [name for name, (k, n) in (LLAMA_3_8B | LLAMA_2_70B).items() if not chosen(linear(n, k), "")]

    assert without(auto_filter(recipe, tokens=16384)) == left_out
    if torchao_leaves_out is not None:
        assert without(torchao_filter(recipe, [])) == torchao_leaves_out


@pytest.mark.parametrize(
    ("recipe", "n", "k", "reason"),
    [
        ("tensorwise", 8192, 8192, None),
        ("tensorwise", 512, 512, "too little to gain: x 0.48 by roofline (H100, 8192 tokens)"),
        ("tensorwise", 1000, 8192, "K=8192, N=1000: not multiples of 16, so each GEMM would be padded"),
    ],
)
def test_the_reason_is_in_words(recipe: str, n: int, k: int, reason: str | None) -> None:
    assert auto_filter(recipe).reason(linear(n, k), "up") == reason


def test_what_is_expected_of_a_layer_that_stays_in() -> None:
    chosen = auto_filter("delayed", device="b200", tokens=2048)
    assert chosen.expectation(linear(8192, 8192), "up") == "x 1.41 by roofline (B200, 2048 tokens)"


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
        ({"device": "B300"}, ValueError, r"device='B300'\): expected one of H100, H200, B200, L40S, or 'cuda'"),
        ({"device": "cpu"}, ValueError, r"device='cpu'\): expected one of H100, H200, B200, L40S, or 'cuda'"),
        ({"device": None}, ValueError, r"device=None\): expected one of H100, H200, B200, L40S, or 'cuda'"),
        ({"tokens": 0}, ValueError, r"auto_filter\(tokens=0\): expected 1 or more"),
        ({"recipe": "rowwize"}, ValueError, "unknown recipe 'rowwize': the recipes are tensorwise, rowwise"),
    ],
)
def test_a_bad_argument_is_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto_filter(**{"recipe": "tensorwise", **arguments})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_this_machines_gpu(monkeypatch: pytest.MonkeyPatch, device: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    assert auto_filter("tensorwise", device=device) == auto_filter("tensorwise", device="H200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ValueError, match="GPU is NVIDIA A100-SXM4-80GB, and only H100, H200, B200, L40S"):
        auto_filter("tensorwise", device=device)


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
