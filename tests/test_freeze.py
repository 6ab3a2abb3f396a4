"""export.freeze_for_inference: float8 weights and constant scales, near the model in training, and apart from it."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compile_checks import graphs_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8
from float8_compile.frozen_linear import FrozenLinear

pytestmark = pytest.mark.usefixtures("afresh")

K, H, N = 64, 96, 32
RECIPES = list(f8.Recipe.names())
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, N)).to(dtype)


def trained(recipe: Any = "tensorwise", dtype: torch.dtype = torch.float32, steps: int = 3) -> Any:
    model = f8.convert_to_float8_training(plain(dtype), config=recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(batch(64, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def batch(tokens: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, K, dtype=dtype)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise, in dB; infinite where the two are equal."""
    actual, expected = actual.detach(), expected.detach()
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


# Numbers


@every_dtype
@every_recipe
def test_on_what_it_was_calibrated_with_it_is_the_model_in_training(recipe: str, dtype: torch.dtype) -> None:
    """To the bit where an input has one scale. A scale per row becomes one a tensor, which costs 1 dB at most here."""
    model, x = trained(recipe, dtype), batch(256, dtype)
    frozen = f8.export.freeze_for_inference(model, [x])
    model.eval()
    with f8.float8_disabled(model), torch.no_grad():
        exact = model(x)
    expected = model(x)
    assert frozen(x).dtype is dtype
    assert sqnr(frozen(x), exact) > sqnr(expected, exact) - 1 > 22
    if recipe == "tensorwise":
        assert torch.equal(frozen(x), expected)


@every_recipe
def test_on_other_inputs_of_their_kind_it_is_as_near_to_high_precision(recipe: str) -> None:
    model = trained(recipe)
    frozen = f8.export.freeze_for_inference(model, [batch() for _ in range(4)])
    model.eval()
    x = batch(512)
    with f8.float8_disabled(model), torch.no_grad():
        exact = model(x)
    assert sqnr(frozen(x), exact) > sqnr(model(x), exact) - 1


@every_dtype
def test_without_calibration_the_scales_are_those_of_delayed_scaling(dtype: torch.dtype) -> None:
    """Its cast multiplies with the reciprocal of a reciprocal, an ulp from the scale at most: -60 dB."""
    model, x = trained("delayed", dtype), batch(256, dtype)
    frozen = f8.export.freeze_for_inference(model)
    assert torch.equal(frozen[0].input_scale, model[0].input_scale.unscale)
    assert torch.equal(frozen[2].input_scale, model[2].input_scale.unscale)
    assert sqnr(frozen(x), model.eval()(x)) > 60


def test_calibration_goes_before_delayed_scales_and_these_fill_its_gaps() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, N), nn.Linear(K, N)

        def forward(self, x: Tensor, both: bool = True) -> Tensor:
            return self.a(x) + self.b(x) if both else self.a(x)

    model = f8.convert_to_float8_training(Branches(), config="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    optimizer.step()
    x = 10 * batch()
    frozen: Any = f8.export.freeze_for_inference(model, [(x, False)])
    assert torch.equal(frozen.a.input_scale, (448 / x.abs().amax().double()).float().reciprocal())
    assert torch.equal(frozen.b.input_scale, model.b.input_scale.unscale)


def test_a_weight_has_the_scales_of_its_recipe() -> None:
    for recipe, shape in (("tensorwise", ()), ("delayed", ()), ("rowwise", (H, 1)), ("rowwise_with_gw_hp", (H, 1))):
        model = trained(recipe)
        layer: Any = f8.export.freeze_for_inference(model, [batch()])[0]  # type: ignore[index]
        assert layer.weight_scale.shape == shape
        assert sqnr(layer.weight.float() * layer.weight_scale, model[0].weight) > 28


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_powers_of_two_stay_powers_of_two(recipe: str) -> None:
    frozen = f8.export.freeze_for_inference(trained(recipe), [batch()])
    for layer in (frozen[0], frozen[2]):  # type: ignore[index]
        for scale in (layer.input_scale, layer.weight_scale):  # type: ignore[union-attr]
            assert (scale.frexp().mantissa == 0.5).all()  # type: ignore[operator, union-attr]


def test_beyond_the_range_it_saturates_and_what_is_not_finite_shows() -> None:
    layer = f8.convert_to_float8_training(nn.Linear(K, N, bias=False))
    frozen = f8.export.freeze_for_inference(layer, [torch.ones(1, K)])
    assert torch.equal(frozen(torch.full((1, K), 1000.0)), frozen(torch.ones(1, K)))
    for number in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(2, K)
        x[0, 0] = number
        assert frozen(x)[0].isnan().all()
        assert torch.equal(frozen(x)[1], frozen(torch.ones(2, K))[1])


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (2, 3, K), (1, 2, 3, K)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_any_shape_as_nn_linear(shape: tuple[int, ...], bias: bool) -> None:
    layer = f8.convert_to_float8_training(nn.Linear(K, N, bias=bias))
    x = torch.randn(shape)
    frozen = f8.export.freeze_for_inference(layer, [torch.randn(9, K)])
    assert frozen(x).shape == (*shape[:-1], N)
    rows = frozen(x.reshape(-1, K))
    assert torch.equal(frozen(x), rows.view(*shape[:-1], N))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (8, 10), (17, 33)])
def test_odd_sizes(recipe: str, k: int, n: int) -> None:
    layer = f8.convert_to_float8_training(nn.Linear(k, n), config=recipe)
    x = torch.randn(5, k)
    frozen = f8.export.freeze_for_inference(layer, [x])
    layer.eval()
    torch.testing.assert_close(frozen(x), layer(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_dtype(dtype: torch.dtype) -> None:
    frozen = f8.export.freeze_for_inference(trained(), [batch()])
    x = batch()
    with torch.autocast("cpu", dtype):
        assert frozen(x).dtype is dtype
    assert frozen(x).dtype is torch.float32


# What runs


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every_recipe
def test_no_amax_is_taken_and_no_weight_is_cast(recipe: str) -> None:
    frozen, x = f8.export.freeze_for_inference(trained(recipe), [batch()]), batch()
    with Ops() as ops:
        frozen(x)
    assert not {"amax", "abs", "max", "aminmax"} & set(ops.names)
    assert ops.names.count("_to_copy") == 2  # each layer's input, to float8
    assert ops.names.count("_scaled_mm") == 2


@every_recipe
def test_compiled_it_is_one_graph_without_an_amax(recipe: str) -> None:
    frozen, x = f8.export.freeze_for_inference(trained(recipe), [batch()]), batch()
    eager = frozen(x)
    compiled_outputs: list[Tensor] = []
    graphs = graphs_of(lambda f: compiled_outputs.append(f(x)), frozen, fullgraph=True)
    assert torch.equal(compiled_outputs[0], eager)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 0)
    assert graphs.calls("amax") == (0, 0)
    assert graphs.calls("_scaled_mm") == (2, 0)


def test_through_inductor() -> None:
    """Inductor keeps what eager code rounds to bfloat16 between the layers: the bound is bfloat16's."""
    frozen, x = f8.export.freeze_for_inference(trained("rowwise", torch.bfloat16), [batch(8, torch.bfloat16)]), batch(8)
    x = x.bfloat16()
    assert sqnr(torch.compile(frozen, fullgraph=True)(x), frozen(x)) > 30


def test_other_token_counts_compile_at_most_three_times() -> None:
    frozen = f8.export.freeze_for_inference(trained(), [batch()])
    compiled = torch.compile(frozen, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for tokens in (16, 3, 0, 1, 48, 2):
            x = batch(tokens)
            assert torch.equal(compiled(x), frozen(x))


def test_of_a_float8_layer_a_quarter_of_the_bytes_is_left() -> None:
    def size(module: nn.Module) -> int:
        return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))

    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(256, 512, bias=False)))
    assert size(f8.export.freeze_for_inference(model, [torch.randn(4, 256)])) == size(model) // 4 + 8


# Inputs for calibration

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x,),
    "list": lambda x: [x],
    "mapping": lambda x: {"input": x},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_input_is_a_tensor_or_arguments(form: Callable[[Tensor], Any]) -> None:
    inputs = [batch(), 3 * batch(), 2 * batch()]
    frozen: Any = f8.export.freeze_for_inference(trained(), (form(x) for x in inputs))
    largest = torch.stack(inputs).abs().amax()
    assert torch.equal(frozen[0].input_scale, (448 / largest.double()).float().reciprocal())


def test_a_layer_called_twice_by_keyword_counts_the_larger() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x) + self.layer(input=5 * x)

    x = batch()
    frozen: Any = f8.export.freeze_for_inference(f8.convert_to_float8_training(Twice()), [x, x[:0]])
    assert torch.equal(frozen.layer.input_scale, (448 / (5 * x).abs().amax().double()).float().reciprocal())


def test_calibration_runs_in_eval_and_eagerly() -> None:
    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled(), torch.compiler.is_compiling()))
            return x

    seen: list[tuple[bool, bool, bool]] = []
    model = torch.compile(nn.Sequential(f8.convert_to_float8_training(nn.Linear(K, N)), Watch()), backend="aot_eager")
    f8.export.freeze_for_inference(model, [batch()])
    assert seen == [(False, False, False)]


# The model that trains


def snapshot(model: nn.Module) -> list[Any]:
    modules = [(type(m), m.training, len(m._forward_pre_hooks)) for m in model.modules()]
    tensors = [(name, t.clone()) for name, t in model.state_dict().items()]
    return [modules, tensors, [(p.requires_grad, id(p), p.data_ptr()) for p in model.parameters()]]


@every_recipe
def test_it_is_left_as_it_was_and_trains_on(recipe: str) -> None:
    model = trained(recipe)
    model[1].eval()  # a part only
    before = snapshot(model)
    frozen = f8.export.freeze_for_inference(model, [batch()])
    after = snapshot(model)
    assert before[0] == after[0]
    assert before[2] == after[2]
    for (name, was), (_, now) in zip(before[1], after[1], strict=True):
        assert torch.equal(was, now), name
    x = batch()
    was_frozen = frozen(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(frozen(x), was_frozen)


def test_calibration_that_fails_leaves_it_as_it_was() -> None:
    model = trained()
    before = snapshot(model)
    with pytest.raises(ValueError, match="last dimension is 3"):
        f8.export.freeze_for_inference(model, [batch(), torch.randn(2, 3)])
    assert [before[0], before[2]] == [snapshot(model)[0], snapshot(model)[2]]


def test_it_is_in_eval_without_parameters_that_train() -> None:
    model = nn.Sequential(nn.Embedding(10, K), trained(), nn.BatchNorm1d(N), nn.Dropout(0.5))
    frozen = f8.export.freeze_for_inference(model, [torch.arange(10)])
    assert not any(m.training for m in frozen.modules())
    assert not any(p.requires_grad for p in frozen.parameters())
    x = torch.arange(10)
    assert torch.equal(frozen(x), frozen(x))
    assert not frozen(x).requires_grad


def test_a_tied_embedding_stays_in_high_precision() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(48, K), nn.Linear(K, 48, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x))

    model = f8.convert_to_float8_training(Tied())
    x = torch.arange(48)
    frozen: Any = f8.export.freeze_for_inference(model, [x])
    assert torch.equal(frozen.embedding.weight, model.embedding.weight)
    assert frozen.embedding.weight is not model.embedding.weight
    assert torch.equal(frozen(x), model.eval()(x))


@pytest.mark.parametrize("disabled", [True, False])
def test_what_runs_in_high_precision_becomes_a_linear(disabled: bool) -> None:
    high = f8.Gemm(f8.Cast(None), f8.Cast(None))
    recipe = f8.Recipe.from_name("delayed")
    model = trained(lambda linear, fqn: recipe if disabled or fqn != "0" else f8.Recipe(high, high, high))
    if disabled:
        model[0].enabled = False
    frozen: Any = f8.export.freeze_for_inference(model, [batch()])
    x = batch()
    assert type(frozen[0]) is nn.Linear
    assert torch.equal(frozen[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    assert isinstance(frozen[2], FrozenLinear)
    assert type(model[0]) is f8.Float8Linear


def test_hooks_run_on() -> None:
    model = trained()
    calls = []
    model[0].register_forward_pre_hook(lambda layer, args: calls.append("before"))
    model[0].register_forward_hook(lambda layer, args, kwargs, y: y + 1, with_kwargs=True)
    x = batch()
    frozen = f8.export.freeze_for_inference(model, [x])
    calls.clear()
    y = frozen(x)
    assert calls == ["before"]
    assert torch.equal(y, model.eval()(x))


def test_a_compiled_model_and_compiled_blocks_freeze_too() -> None:
    model = trained()
    x = batch()
    expected = f8.export.freeze_for_inference(model, [x])(x)
    assert torch.equal(f8.export.freeze_for_inference(torch.compile(model), [x])(x), expected)  # type: ignore[arg-type]
    model[0].compile(backend="aot_eager")
    assert torch.equal(f8.export.freeze_for_inference(model, [x])(x), expected)


def test_torchs_own_encoder_runs_its_frozen_layers() -> None:
    """Its inference kernel would read their weights as if they were in high precision (attention.py)."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(K, 2, H, batch_first=True), 2)
    f8.convert_to_float8_training(encoder)
    x, padding = torch.randn(2, 5, K), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    frozen = f8.export.freeze_for_inference(encoder, [{"src": x, "src_key_padding_mask": padding}])
    called = []
    for layer in frozen.modules():
        if isinstance(layer, FrozenLinear):
            layer.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        actual, expected = (m(x, src_key_padding_mask=padding) for m in (frozen, encoder.eval()))
    assert len(called) == 4
    assert sqnr(actual, expected) > 50


def test_a_single_layer_freezes() -> None:
    frozen = f8.export.freeze_for_inference(f8.convert_to_float8_training(nn.Linear(K, N)), [batch()])
    assert type(frozen) is FrozenLinear


# The layer as a module

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16()": nn.Module.bfloat16,
    "half()": nn.Module.half,
    "to(float64)": lambda m: m.to(torch.float64),
    "to(device, dtype)": lambda m: m.to("cpu", torch.bfloat16),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_of_the_model_leave_weight_and_scales(cast: Callable[[nn.Module], nn.Module]) -> None:
    frozen = f8.export.freeze_for_inference(trained("rowwise"), [batch()])
    before = copy.deepcopy(frozen.state_dict())
    for name, tensor in cast(frozen).state_dict().items():
        if not name.endswith("bias"):
            assert tensor.dtype is before[name].dtype
            assert torch.equal(tensor.float(), before[name].float()), name


def test_to_meta_and_back_it_loads_its_state() -> None:
    frozen = f8.export.freeze_for_inference(trained("rowwise"), [batch()])
    x = batch()
    empty = copy.deepcopy(frozen).to("meta").to_empty(device="cpu")
    empty.load_state_dict(frozen.state_dict(), strict=True)
    assert torch.equal(empty(x), frozen(x))


def test_its_state_has_the_names_of_float8_checkpoints_and_plain_tensors() -> None:
    state = f8.export.freeze_for_inference(trained("delayed"), [batch()]).state_dict()
    assert list(state) == [f"{n}.{t}" for n in (0, 2) for t in ("weight", "weight_scale", "input_scale", "bias")]
    assert all(type(t) is Tensor for t in state.values())
    assert state["0.weight"].dtype is torch.float8_e4m3fn
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == state.keys()


def test_it_says_what_it_is() -> None:
    frozen = f8.export.freeze_for_inference(trained("rowwise"), [batch()])
    text = "in_features=64, out_features=96, bias=True, weight=torch.float8_e4m3fn, one weight scale a row"
    assert f"FrozenLinear({text})" in repr(frozen)


# Mistakes


def one_shot() -> Iterator[Tensor]:
    yield batch()
    raise RuntimeError("the data ended early")


MISTAKES: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "one input": (trained, batch(), TypeError, r"^calibration=Tensor: expected several inputs.*such as \[batch\]"),
    "one mapping": (trained, {"input": batch()}, TypeError, "^calibration=dict: expected several inputs"),
    "nothing converted": (plain, [batch()], TypeError, "^Sequential has no Float8Linear to freeze: convert it first"),
    "no scales": (trained, None, ValueError, r"^no scale is known for the inputs of 0, 2: pass calibration=\["),
    "no inputs": (trained, [], ValueError, r"^no scale is known for the inputs of 0, 2: no calibration input reaches"),
    "only zeros": (trained, [torch.zeros(2, K)], ValueError, r"inputs of 0: .*or only zeros do; .*enabled = False"),
    "a NaN": (trained, [batch() * torch.nan], ValueError, "^layer '0': in calibration the largest .* is nan"),
    "an infinity": (trained, [batch() * torch.inf], ValueError, "^layer '0': in calibration the largest .* is inf"),
    "a data error": (trained, one_shot(), RuntimeError, "the data ended early"),
    "delayed, untrained": (
        lambda: trained("delayed", steps=0),
        None,
        ValueError,
        "or train with delayed scales, or leave a layer in high precision",
    ),
}


@pytest.mark.parametrize(("build", "calibration", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(build: Any, calibration: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        f8.export.freeze_for_inference(build(), calibration)


def test_a_weight_that_a_gather_waits_for_is_refused() -> None:
    gathers = dataclasses.replace(f8.Recipe.from_name("tensorwise"), fsdp_float8_all_gather=True)
    with pytest.raises(TypeError, match="layer '0': its weight is split or gathered over processes: save a checkpoint"):
        f8.export.freeze_for_inference(f8.convert_to_float8_training(plain(), config=gathers), [batch()])


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, K, dtype=torch.int64), TypeError, "FrozenLinear '0': the input is torch.int64"),
        (torch.ones(2, 8), ValueError, "FrozenLinear '0': the input's last dimension is 8 in .* in_features is 64"),
    ],
)
def test_inputs_that_do_not_fit_are_named(x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        f8.export.freeze_for_inference(trained(), [batch()])(x)
