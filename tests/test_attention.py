"""torch's attention modules: their linear layers run in float8, in inference too, and what doesn't is reported."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8

WIDTH, HIDDEN = 32, 64
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
X = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[False] * 4, [False, False, True, True]])  # the last two tokens of the second sequence


class Ops(TorchDispatchMode):
    """Counts what runs: torch's kernel, nested tensors, float8 GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))

    def of_interest(self) -> tuple[int, int, int]:
        names = "_transformer_encoder_layer_fwd", "_nested_tensor_from_mask", "_scaled_mm"
        return tuple(self.counts[name] for name in names)  # type: ignore[return-value]


def layer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True, **options).eval()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True), 2).eval()


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Transformer(WIDTH, 2, 1, 1, HIDDEN, batch_first=True).eval()


def padded_transformer(model: Any) -> Tensor:
    return model(X, X, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)


# name: how it is built, how it is called, and its linear layers, each of which runs once
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]] = {
    "layer": (layer, lambda model: model(X), 2),
    "layer, gelu": (lambda: layer(activation="gelu"), lambda model: model(X), 2),
    "layer, padding": (layer, lambda model: model(X, src_key_padding_mask=PADDING), 2),
    "encoder": (encoder, lambda model: model(X), 4),
    "encoder, padding": (encoder, lambda model: model(X, src_key_padding_mask=PADDING), 4),
    "transformer": (whole, padded_transformer, 4),
}
every_model = pytest.mark.parametrize(("build", "run", "linears"), MODELS.values(), ids=MODELS)


def on_slow_path(model: nn.Module, run: Callable[[Any], Tensor]) -> Tensor:
    """By torch's own rules, whatever the attributes say: a kernel is not taken where a module has a hook."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        if isinstance(part, nn.TransformerEncoderLayer):
            part.norm1.register_forward_hook(lambda *_: None)
    with torch.no_grad(), Ops() as ops:
        y = run(model)
    assert ops.of_interest()[:2] == (0, 0)
    return y


# torch's kernel for inference


def test_torch_reads_the_attributes_that_are_switched_off() -> None:
    """What conversion relies on: with them on its kernel runs, and with them off it doesn't, nor anything nested."""
    plain, padded = encoder(), MODELS["encoder, padding"][1]

    def of_interest() -> tuple[int, int, int]:
        with torch.no_grad(), Ops() as ops:
            padded(plain)
        return ops.of_interest()

    assert of_interest() == (2, 1, 0)
    plain.use_nested_tensor = False
    assert of_interest() == (2, 0, 0)
    plain.layers[0].activation_relu_or_gelu = 0
    assert of_interest() == (1, 0, 0)


@every_recipe
@every_model
def test_in_inference_too_every_linear_layer_runs_in_float8(
    recipe: str, build: Callable[[], nn.Module], run: Callable[[Any], Tensor], linears: int
) -> None:
    plain = build()
    model = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    with torch.no_grad(), Ops() as ops:
        y = run(model)
    assert ops.of_interest() == (0, 0, linears)
    assert torch.equal(y, on_slow_path(model, run))
    expected = on_slow_path(plain, run)
    assert not torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=0, atol=0.3)  # float8's rounding of normalized numbers


@pytest.mark.parametrize("without_gradients", [torch.inference_mode, torch.enable_grad], ids=["inference", "frozen"])
def test_frozen_or_in_inference_mode(without_gradients: Any) -> None:
    model, run = f8.convert_to_float8_training(encoder()).requires_grad_(False), MODELS["encoder, padding"][1]
    with without_gradients(), Ops() as ops:
        run(model)
    assert ops.of_interest() == (0, 0, 4)


@every_recipe
def test_compiled_it_is_the_same(recipe: str) -> None:
    """`mask_check=True` keeps a compiled encoder from nested tensors; its layers took the kernel all the same."""
    model, run = f8.convert_to_float8_training(encoder(), config=recipe), MODELS["encoder, padding"][1]
    with torch.no_grad():
        expected = run(model)
        assert torch.equal(run(torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


def test_what_is_converted_after_it_was_compiled() -> None:
    model, run = encoder(), MODELS["encoder, padding"][1]
    fast = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        before = run(fast)
        f8.convert_to_float8_training(fast)
        assert torch.equal(run(fast), run(model))
        assert not torch.equal(run(fast), before)
        f8.convert_from_float8_training(fast)
        assert torch.equal(run(fast), before)


@every_recipe
def test_it_trains(recipe: str) -> None:
    model, run = f8.convert_to_float8_training(encoder(), config=recipe).train(), MODELS["encoder, padding"][1]
    with Ops() as ops:
        run(model).square().sum().backward()
    assert ops.of_interest() == (0, 0, 4 * (2 if recipe == "rowwise_with_gw_hp" else 3))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_runs_in_float8_too_and_goes_back_by_itself(copied: Callable[[Any], Any]) -> None:
    model, run = f8.convert_to_float8_training(encoder()), MODELS["encoder, padding"][1]
    other = copied(model)
    with torch.no_grad():
        assert torch.equal(run(other), run(model))
        f8.convert_from_float8_training(other)
        with Ops() as ops:
            run(other)
        assert ops.of_interest() == (2, 1, 0)
        with Ops() as ops:
            run(model)
        assert ops.of_interest() == (0, 0, 4)


@every_model
def test_disabled_it_gives_the_numbers_of_high_precision(
    build: Callable[[], nn.Module], run: Callable[[Any], Tensor], linears: int
) -> None:
    """Bitwise those of torch's other path, and its kernel's to the rounding of sums, where tokens are not padding: for
    those it gives 0."""
    plain = build()
    model = f8.convert_to_float8_training(copy.deepcopy(plain))
    with f8.float8_disabled(model), torch.no_grad(), Ops() as ops:
        y = run(model)
    assert ops.of_interest() == (0, 0, 0)
    assert torch.equal(y, on_slow_path(plain, run))
    with torch.no_grad():
        fast = run(plain)
    torch.testing.assert_close(y[~PADDING], fast[~PADDING], rtol=1e-4, atol=1e-5)


# Back, and in part


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(part).items() if name[0] != "_"} for part in model.modules()]


@every_recipe
@pytest.mark.parametrize("build", [layer, encoder, whole, lambda: layer(activation=torch.tanh)])
def test_converted_back_nothing_is_left_of_it(recipe: str, build: Callable[[], nn.Module]) -> None:
    model = build()
    before = attributes(model)
    f8.convert_to_float8_training(model, config=recipe)
    f8.convert_to_float8_training(model, config=recipe)
    f8.convert_from_float8_training(model)
    assert attributes(model) == before


def of_interest(model: nn.Module) -> tuple[int, int, int]:
    with torch.no_grad(), Ops() as ops:
        MODELS["encoder, padding"][1](model)
    return ops.of_interest()


@pytest.mark.parametrize("name", ["layers.0.linear1", "layers.1.linear2"])
def test_a_layer_without_float8_keeps_its_kernel(name: str) -> None:
    """And one linear layer of the two is enough."""
    model = f8.convert_to_float8_training(encoder(), module_filter_fn=lambda linear, fqn: fqn == name)
    assert of_interest(model) == (1, 0, 1)


def test_converted_and_back_layer_by_layer() -> None:
    model = f8.convert_to_float8_training(encoder())
    f8.convert_from_float8_training(model.layers[0])
    assert of_interest(model) == (1, 0, 2)
    f8.convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: fqn == "layers.1.linear1")  # once more
    assert of_interest(model) == (1, 0, 2)
    f8.convert_from_float8_training(model)
    assert of_interest(model) == (2, 1, 0)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")  # torch says what it found
def test_an_encoder_of_a_converted_layer() -> None:
    """torch makes copies of the layer."""
    model = nn.TransformerEncoder(f8.convert_to_float8_training(layer()), 2).eval()
    assert of_interest(model) == (0, 0, 4)


def test_an_encoder_that_conversion_did_not_see_says_so() -> None:
    """It hands its layers nested tensors, which a Float8Linear refuses."""
    model = encoder()
    f8.convert_to_float8_training(model.layers)
    with pytest.raises((RuntimeError, TypeError), match=r"[Nn]ested"):
        of_interest(model)
    f8.convert_to_float8_training(model)
    assert of_interest(model) == (0, 0, 4)


def test_a_linear_layer_that_is_converted_by_itself_does_not_know_who_holds_it() -> None:
    """What is said in attention.py; whatever is converted around it afterwards makes it right."""
    model = encoder()
    for part in model.layers:
        f8.convert_to_float8_training(part.linear1)
    assert of_interest(model) == (2, 1, 0)
    f8.convert_to_float8_training(model, module_filter_fn=lambda linear, fqn: fqn == "layers.0.linear2")
    assert of_interest(model) == (0, 0, 3)


# The report


def test_the_packed_projection_is_in_the_report() -> None:
    model = f8.convert_to_float8_training(layer())
    assert str(f8.conversion_report(model)) == (
        "layer                      K   N  recipe, or why not\n"
        "------------------------  --  --  ---------------------------------------------------------------------------"
        "-------\n"
        "self_attn.in_proj_weight  32  96  - nn.MultiheadAttention multiplies by it without a linear layer: in high "
        "precision\n"
        "self_attn.out_proj        32  32  - nn.MultiheadAttention reads its weight and never calls it\n"
        "linear1                   32  64  tensorwise\n"
        "linear2                   64  32  tensorwise\n"
        "2 of 4 linear layers run in float8; their weights are 48% of the model's parameters"
    )


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.MultiheadAttention(32, 2), [("in_proj_weight", 32, 96), ("out_proj", 32, 32)]),
        (
            lambda: nn.MultiheadAttention(32, 2, kdim=48, vdim=16),
            [("q_proj_weight", 32, 32), ("k_proj_weight", 48, 32), ("v_proj_weight", 16, 32), ("out_proj", 32, 32)],
        ),
        (
            lambda: nn.TransformerDecoderLayer(32, 2, 64),
            [(f"{name}.{part}", 32, n) for name in ("self_attn", "multihead_attn")
             for part, n in (("in_proj_weight", 96), ("out_proj", 32))],
        ),
    ],
    ids=["packed", "q, k and v", "a decoder's two"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:no layer was converted")
@pytest.mark.parametrize("convert", [f8.convert_to_float8_training, lambda model: model], ids=["converted", "never"])
def test_what_attention_multiplies_itself_is_not_in_float8(
    convert: Callable[[Any], Any], build: Callable[[], nn.Module], expected: list[tuple[str, int, int]]
) -> None:
    report = f8.conversion_report(convert(build()))
    rows = [(row.fqn, row.k, row.n) for row in report if row.reason.startswith("nn.MultiheadAttention ")]
    assert rows == expected
    assert all(row.recipe is None for row in report if (row.fqn, row.k, row.n) in rows)


@pytest.mark.parametrize("linear", [nn.Linear, f8.Float8Linear])
def test_a_linear_layer_put_in_the_place_of_out_proj_is_not_called_either(linear: type[nn.Linear]) -> None:
    model = layer()
    model.self_attn.out_proj = linear(WIDTH, WIDTH)
    f8.convert_to_float8_training(model, config="delayed")
    assert type(model.self_attn.out_proj) is linear
    row = f8.conversion_report(model)[1]
    assert (row.fqn, row.recipe, row.reason[:26]) == ("self_attn.out_proj", None, "nn.MultiheadAttention read")


def test_attention_alone_keeps_its_kernel() -> None:
    """It reads nothing that is converted."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True), "up": nn.Linear(WIDTH, 16)})
    model.eval()

    def attended() -> tuple[Tensor, int]:
        with torch.no_grad(), Ops() as ops:
            y = model["attention"](X, X, X, need_weights=False)[0]
        return y, ops.counts["_native_multi_head_attention"]

    before = attended()
    f8.convert_to_float8_training(model)
    after = attended()
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1] == 1
