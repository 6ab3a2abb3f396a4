"""A Float8Linear is an `nn.Linear` with float8's error and nothing else that a caller could notice. Eagerly."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import linear_float64
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8
from float8_compile.cast import cast
from float8_compile.delayed_step import scales_of

M, K, N = 16, 48, 32  # different from each other, so that a shape says whose it is
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
keep_or_recompute = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def layer_of(
    recipe: str, bias: bool = True, dtype: torch.dtype = FP32, recompute: bool = True, k: int = K, n: int = N
) -> f8.Float8Linear:
    return f8.Float8Linear(k, n, bias, dtype=dtype, recipe=recipe, recompute_weight_cast=recompute)


def step(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of input, weight and bias where they are wanted."""
    x = x.detach().requires_grad_()
    wanted = {"input": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    y = layer(x)
    return {"output": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, [*wanted.values()], g), strict=True))}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor, expected[name]), f"{name} differs by {(tensor - expected[name]).abs().max()}"


# The arithmetic

# Half the distance to the next value: relative, and below the smallest normal number, where a scale of a power of two
# may leave half of the range unused, as a share of amax.
ROUNDING = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
FLUSHING = {torch.float8_e4m3fn: 2 * 2.0**-10 / 448, torch.float8_e5m2: 2 * 2.0**-17 / 57344}


def error_of_cast(t: Tensor, how: f8.Cast) -> Tensor:
    """At most what the cast takes from each element."""
    magnitude = t.double().abs()
    if how.dtype is None:
        return torch.zeros_like(magnitude)
    return ROUNDING[how.dtype] * magnitude + FLUSHING[how.dtype] * magnitude.max()


def error_of_gemm(gemm: f8.Gemm, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """At most what a float8 `a @ b.T` differs by from the exact one, rounded to dtype."""
    size_a, size_b = a.double().abs(), b.double().abs()
    error_a, error_b = error_of_cast(a, gemm.left), error_of_cast(b, gemm.right)
    of_casts = error_a @ size_b.t() + size_a @ error_b.t() + error_a @ error_b.t()
    # one rounding of the product, one of a scaled or biased one, and float32's while adding up
    return of_casts + (2 * torch.finfo(dtype).eps + 1e-5) * (size_a @ size_b.t() + of_casts)


@every_recipe
@every_dtype
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    magnitudes=st.tuples(*[st.sampled_from([1e-3, 1.0, 30.0])] * 3),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=10)
def test_every_number_is_the_exact_one_within_the_error_of_its_casts(
    recipe: str, dtype: torch.dtype, sizes: tuple[int, int, int], magnitudes: tuple[float, float, float], seed: int
) -> None:
    m, k, n = sizes
    torch.manual_seed(seed)
    layer = layer_of(recipe, bias=False, dtype=dtype, k=k, n=n)
    x, w, g = (
        torch.randn(shape).mul(size).to(dtype) for shape, size in zip([(m, k), (n, k), (m, n)], magnitudes, strict=True)
    )
    layer.weight.data.copy_(w)
    results = list(step(layer, x, g).values())
    how = layer.recipe
    bounds = (
        error_of_gemm(how.output, x, w, dtype),
        error_of_gemm(how.grad_input, g, w.t(), dtype),
        error_of_gemm(how.grad_weight, g.t(), x.t(), dtype),
    )
    tiny = torch.finfo(dtype).smallest_normal
    for result, exact, bound in zip(results, linear_float64(x, w, g), bounds, strict=True):
        assert ((result.double() - exact).abs() <= bound + tiny).all()


@pytest.mark.parametrize(
    ("gemm", "name", "sizes"),  # where nothing is added up the bound is the casts' own error
    [("output", "output", (99, 1, 99)), ("grad_input", "input", (99, 99, 1)), ("grad_weight", "weight", (1, 99, 99))],
)
def test_the_bound_would_see_a_coarser_format(gemm: str, name: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    layer, x, g = layer_of("rowwise", bias=False, k=k, n=n), torch.randn(m, k), torch.randn(m, n)
    w = layer.weight.detach()
    a, b = {"output": (x, w), "grad_input": (g, w.t()), "grad_weight": (g.t(), x.t())}[gemm]
    bound = error_of_gemm(getattr(layer.recipe, gemm), a, b, FP32)
    for coarser in (False, True):
        if coarser:
            e5m2 = f8.Gemm(f8.Cast(torch.float8_e4m3fn), f8.Cast(torch.float8_e5m2))
            layer.recipe = replace(layer.recipe, **{gemm: e5m2})
        error = (step(layer, x, g)[name].double() - a.double() @ b.double().t()).abs()
        assert (error <= bound).all() == (not coarser)


@every_recipe
@every_dtype
def test_bias_is_added_in_the_outputs_dtype(recipe: str, dtype: torch.dtype) -> None:
    layer = layer_of(recipe, dtype=dtype)
    without = layer_of(recipe, bias=False, dtype=dtype)
    without.weight = layer.weight
    x = torch.randn(M, K, dtype=dtype)
    assert torch.equal(layer(x), without(x) + layer.bias)


@every_recipe
def test_the_gradient_of_bias_is_summed_in_float32(recipe: str) -> None:
    """1001 ones: a running sum in bfloat16 stops at 256, and a rounded one is 1000."""
    layer, ones = layer_of(recipe), torch.ones(1001, N, dtype=BF16)
    assert (step(layer, torch.randn(1001, K, dtype=BF16), ones)["bias"] == 1001).all()

    running = torch.zeros((), dtype=BF16)
    for one in ones[:, 0]:
        running += one
    assert (running.item(), ones[:, 0].sum().item()) == (256, 1000)


@every_recipe
@pytest.mark.parametrize("bias", [True, False])
@every_dtype
def test_kept_or_cast_again_the_weight_gives_the_same_bits(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    layer = layer_of(recipe, bias, dtype)
    x, g = torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype)
    cast_again = step(layer, x, g)
    layer.recompute_weight_cast = False
    assert_same_bits(step(layer, x, g), cast_again)


@every_recipe
def test_emulation_multiplies_no_float8_and_gives_the_same_numbers(recipe: str) -> None:
    layer = layer_of(recipe)
    x, g = torch.randn(M, K), torch.randn(M, N)
    real = step(layer, x, g)
    layer.recipe = replace(layer.recipe, emulate=True)
    with Watch() as watch:
        emulated = step(layer, x, g)
    assert watch.calls["_scaled_mm"] == 0
    for name, tensor in emulated.items():
        torch.testing.assert_close(tensor, real[name], rtol=1e-5, atol=1e-5, msg=name)


# Work and memory


class Watch(TorchDispatchMode):
    """What ran inside: how often each op, which shapes were cast to float8 and searched for amax; what is left of it.

    calls: ops by name.   casts, amaxes: (rows, columns) of each matrix that was cast, or reduced to one number a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.casts: list[tuple[int, ...]] = []
        self.amaxes: list[tuple[int, ...]] = []
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        if func is torch.ops.aten._to_copy.default and result.dtype is not args[0].dtype and result.dtype.itemsize == 1:
            self.casts.append(tuple(result.shape))
        if func in (torch.ops.aten.max.default, torch.ops.aten.amax.default) and args[0].dim() == 2:
            self.amaxes.append(tuple(args[0].shape))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def gemms(self) -> int:
        return self.calls["_scaled_mm"] + self.calls["mm"]

    def alive(self) -> dict[int, int]:
        """{storage: bytes} of everything that was made inside and still exists."""
        return {ref.cdata: nbytes for ref, nbytes in self._made if not ref.expired()}


def storages(*tensors: Tensor | None) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t is not None}


def state(*layers: nn.Module) -> list[Tensor]:
    """The tensors of delayed scales, which steps write to and hold no copies of."""
    entries = [entry for layer in layers for entry in scales_of(layer).values()]
    return [tensor for entry in entries for tensor in (entry.amax, entry.scale, entry.unscale)]


# recipe: how often x, w and g are cast, with the weight kept (cast again, it is once more where one cast is enough)
CASTS = {"tensorwise": (1, 1, 1), "rowwise": (2, 2, 2), "rowwise_with_gw_hp": (1, 2, 1), "delayed": (1, 1, 1)}
ONE_CAST = ("tensorwise", "delayed")  # for both GEMMs of each operand


@every_recipe
@keep_or_recompute
def test_a_step_is_three_gemms_and_each_operand_is_cast_once(recipe: str, recompute: bool) -> None:
    """Once, that is, for each of its GEMMs that wants another cast; and no amax of the same thing is taken twice."""
    layer, x = layer_of(recipe, recompute=recompute), torch.randn(M, K, requires_grad=True)
    with Watch() as watch:
        layer(x).pow(2).sum().backward()
    of_x, of_w, of_g = CASTS[recipe]
    again = recompute and recipe in ONE_CAST
    assert watch.gemms == 3
    assert Counter(watch.casts) == {(M, K): of_x, (N, K): of_w + again, (M, N): of_g}
    assert Counter(watch.amaxes) == {(M, K): of_x, (N, K): of_w, (M, N): of_g}


@keep_or_recompute
def test_once_there_are_delayed_scales_no_amax_of_a_weight_is_taken(recompute: bool) -> None:
    layer, x = layer_of("delayed", recompute=recompute), torch.randn(M, K, requires_grad=True)
    f8.mark_calibrated(layer)
    with Watch() as watch:
        layer(x).pow(2).sum().backward()
    assert watch.gemms == 3
    assert Counter(watch.casts) == {(M, K): 1, (N, K): 1 + recompute, (M, N): 1}
    assert Counter(watch.amaxes) == {(M, K): 1, (M, N): 1}


# what needs a gradient: GEMMs, casts of (x, w, g) in tensorwise with the weight kept
NEEDS = {
    ("input", "weight"): (3, (1, 1, 1)),
    ("input",): (2, (1, 1, 1)),  # a frozen weight
    ("weight",): (2, (1, 1, 1)),  # a first layer
    ("bias",): (1, (1, 1, 0)),
    (): (1, (1, 1, 0)),
}


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(needs) or "nothing")
def test_only_needed_gemms_run(recipe: str, recompute: bool, needs: tuple[str, ...]) -> None:
    """Scenario 16."""
    layer = layer_of(recipe, recompute=recompute)
    leaves = {"input": torch.randn(M, K), **dict(layer.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needs)
    with Watch() as watch:
        y = layer(leaves["input"])
        if needs:
            y.backward(torch.randn(M, N))
    gemms, casts = NEEDS[needs]
    assert watch.gemms == gemms
    if recipe in ONE_CAST:
        again = recompute and "input" in needs
        assert Counter(watch.casts) == Counter({(M, K): casts[0], (N, K): casts[1] + again, (M, N): casts[2]})
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needs)


@every_recipe
def test_without_gradients_one_gemm_runs_and_nothing_is_kept(recipe: str) -> None:
    layer, x = layer_of(recipe, recompute=False), torch.randn(M, K, requires_grad=True)
    with Watch() as watch, torch.no_grad():
        y = layer(x)
    assert (watch.gemms, len(watch.casts)) == (1, 2)
    assert watch.alive().keys() == storages(y)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)


@every_recipe
def test_the_gradient_below_a_frozen_layer_is_the_one_below_a_trained_one(recipe: str) -> None:
    model = nn.Sequential(layer_of(recipe), layer_of(recipe, k=N, n=K), layer_of(recipe))
    x, g = torch.randn(M, K), torch.randn(M, N)
    trained = step(model, x, g)
    model[1].requires_grad_(False)
    assert_same_bits(step(model, x, g), {name: t for name, t in trained.items() if not name.startswith("1.")})


# recipe: bytes made and kept for backward of the input, of a weight that is cast again, and of a kept one. A number is
# 4 bytes, and rows have one each: of what is kept 1 / scale, which its GEMM wants, of a weight to be cast again the
# scale too. Where an operand has two casts backward wants the input itself, which the caller holds anyway, as the model
# does the weight. Delayed scales are the state's own, where there is evidence ("calibrated").
KEPT = {
    "tensorwise": (M * K + 4, 4 + 4, N * K + 4),
    "rowwise": (0, 0, N * K + 4 * K),
    "rowwise_with_gw_hp": (0, 0, N * K + 4),
    "delayed": (M * K + 4, 4 + 4, N * K + 4),
    "calibrated": (M * K, 0, N * K),
}


def test_the_table_of_what_is_kept_has_every_recipe() -> None:
    assert KEPT.keys() == {*f8.Recipe.names(), "calibrated"}


@pytest.mark.parametrize("recipe", KEPT)
@keep_or_recompute
@every_dtype
def test_a_layer_keeps_these_bytes(recipe: str, recompute: bool, dtype: torch.dtype) -> None:
    """True: the float8 input, nothing of the weight's size. False: N·K bytes on top."""
    layer = layer_of("delayed" if recipe == "calibrated" else recipe, dtype=dtype, recompute=recompute)
    if recipe == "calibrated":
        f8.mark_calibrated(layer)
    x = torch.randn(M, K, dtype=dtype, requires_grad=True)
    with Watch() as watch:
        y = layer(x)
    held_anyway = storages(y, x, *layer.parameters(), *state(layer))
    kept = [nbytes for storage, nbytes in watch.alive().items() if storage not in held_anyway]
    of_input, of_weight, of_kept_weight = KEPT[recipe]
    assert sum(kept) == of_input + (of_weight if recompute else of_kept_weight)
    assert (N * K in kept) == (not recompute)


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("needs", [needs for needs in NEEDS if needs], ids="+".join)
def test_only_plain_tensors_are_saved_and_nothing_stays_on_ctx(
    recipe: str, recompute: bool, needs: tuple[str, ...]
) -> None:
    layer = layer_of(recipe, recompute=recompute)
    leaves = {"input": torch.randn(M, K), **dict(layer.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needs)
    node = layer(leaves["input"]).grad_fn
    assert node is not None
    assert {type(t) for t in node.saved_tensors if t is not None} <= {Tensor, nn.Parameter}
    attributes = {name: getattr(node, name) for name in vars(node)}
    delayed = layer.input_scale, layer.grad_output_scale, layer.weight_scale
    assert attributes.pop("state")[:3] == delayed  # the layer's own state
    assert attributes  # else this asks nothing
    assert not any(isinstance(value, (Tensor, tuple, list, dict)) for value in attributes.values()), attributes


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("leading", [(M,), (2, M // 2)], ids=str)
def test_after_backward_only_gradients_output_and_loss_are_alive(
    recipe: str, recompute: bool, leading: tuple[int, ...]
) -> None:
    """Scenario 50. The GEMM that leaked held its inputs as long as the loss."""
    model = nn.Sequential(layer_of(recipe, recompute=recompute), nn.GELU(), layer_of(recipe, k=N, n=K))
    x = torch.randn(*leading, K, requires_grad=True)
    gc.collect()
    gc.disable()  # what a reference cycle holds counts as alive
    try:
        with Watch() as watch:
            y = model(x)
            loss = y.square().sum()
            before = watch.alive().keys()
            loss.backward()
        alive = watch.alive().keys()
    finally:
        gc.enable()
    gradients = [leaf.grad for leaf in (x, *model.parameters())]
    allowed = storages(*gradients, loss, y) | storages(x, *model.parameters(), *state(*model))  # the last as views
    assert alive <= allowed
    assert not before <= allowed  # so the question can be answered wrongly


@every_recipe
@keep_or_recompute
def test_in_50_steps_nothing_piles_up(recipe: str, recompute: bool) -> None:
    model = nn.Sequential(layer_of(recipe, recompute=recompute), nn.GELU(), layer_of(recipe, k=N, n=K))
    optimizer = torch.optim.AdamW(model.parameters())
    alive, held_anyway = [], storages(*state(*model))
    gc.collect()
    with Watch() as watch:
        for _ in range(50):
            model(torch.randn(M, K)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            made = {storage: nbytes for storage, nbytes in watch.alive().items() if storage not in held_anyway}
            alive.append((len(made), sum(made.values())))
    assert len(set(alive)) == 1, alive


# Zeros, tiny and huge numbers, NaN


@every_recipe
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_zero_tokens_go_through_a_model_and_back(
    recipe: str, leading: tuple[int, ...], bias: bool, autocast: bool
) -> None:
    """Scenario 9."""
    model = nn.Sequential(layer_of(recipe, bias), nn.ReLU(), layer_of(recipe, bias, k=N, n=7))
    x = torch.empty(*leading, K, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        y = model(x)
    y.sum().backward()
    assert (y.shape, y.dtype) == ((*leading, 7), BF16 if autocast else FP32)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, FP32)
        assert not parameter.grad.any()


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("zero", ["input", "weight", "gradient"])
def test_zeros_give_exact_zeros(recipe: str, recompute: bool, zero: str) -> None:
    """Scenario 11."""
    layer = layer_of(recipe, bias=False, recompute=recompute)
    tensors = {"input": torch.randn(M, K), "weight": layer.weight.data, "gradient": torch.randn(M, N)}
    tensors[zero].zero_()
    result = step(layer, tensors["input"], tensors["gradient"])
    touched = {"input": ("output", "weight"), "weight": ("output", "input"), "gradient": ("input", "weight")}
    for name, tensor in result.items():
        assert tensor.isfinite().all()
        assert tensor.any() == (name not in touched[zero]), name


@every_recipe
def test_a_zero_row_gives_a_zero_row_and_leaves_the_others_as_they_are(recipe: str) -> None:
    layer, x, g = layer_of(recipe, bias=False), torch.randn(M, K), torch.randn(M, N)
    without = step(layer, x, g)
    x[3], g[5] = 0, 0
    result = step(layer, x, g)
    assert not result["output"][3].any()
    assert not result["input"][5].any()
    others = torch.arange(M) != 3
    assert torch.equal(result["output"][others], without["output"][others])
    assert all(tensor.isfinite().all() for tensor in result.values())


@every_recipe
def test_a_zero_initialised_adapter_adds_nothing_and_can_learn(recipe: str) -> None:
    down, up = layer_of(recipe, bias=False, n=8), layer_of(recipe, bias=False, k=8)
    nn.init.zeros_(up.weight)
    x = torch.randn(M, K, requires_grad=True)
    y = up(down(x))
    y.backward(torch.randn(M, N))
    assert not y.any()
    assert x.grad is not None
    assert not x.grad.any()
    assert down.weight.grad is not None
    assert not down.weight.grad.any()
    assert up.weight.grad is not None
    assert up.weight.grad.any()
    assert up.weight.grad.isfinite().all()


MAGNITUDES = [1e-8, 1e-20, 1e-30, 1e-38, 1e-41, torch.finfo(FP32).max]


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("which", ["input", "weight", "gradient"])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_at_every_magnitude_a_step_is_finite_and_as_exact_as_float8(
    recipe: str, recompute: bool, which: str, magnitude: float
) -> None:
    """Scenario 12: of the input, the weight or the gradient, the others being such that the products exist."""
    layer = layer_of(recipe, bias=False, recompute=recompute)
    others = 1e-3 if magnitude > 1 else 1.0
    signs = {"input": (M, K), "weight": (N, K), "gradient": (M, N)}
    x, w, g = (
        (torch.rand(shape) * 0.9 + 0.1) * torch.randn(shape).sign() * (magnitude if name == which else others)
        for name, shape in signs.items()
    )
    layer.weight.data.copy_(w)
    result = step(layer, x, g)
    exact = dict(zip(("output", "input", "weight"), linear_float64(x, w, g), strict=True))
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name
        if magnitude >= 1e-30:
            error = (tensor.double() - exact[name]).norm() / exact[name].norm()
            assert error < 2.0**-4, f"{name}: {error}"


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_one_bad_element_is_seen_in_the_loss_and_in_the_gradients(
    recipe: str, recompute: bool, bad: float, where: str
) -> None:
    """Scenario 14: a GradScaler must see it."""
    layer = layer_of(recipe, recompute=recompute)
    tensors = {"input": torch.randn(M, K), "weight": layer.weight.data, "gradient": torch.randn(M, N)}
    tensors[where][1, 2] = bad
    result = step(layer, tensors["input"], tensors["gradient"])
    reached = {"input": ("output", "weight"), "weight": ("output", "input"), "gradient": ("input", "weight", "bias")}
    for name in reached[where]:
        assert not result[name].isfinite().all(), name
    assert result["output"].sum().isfinite() == (where == "gradient")


@every_recipe
def test_a_grad_scaler_skips_a_step_that_overflows_and_takes_the_next(recipe: str) -> None:
    model = nn.Sequential(layer_of(recipe), nn.GELU(), layer_of(recipe, k=N, n=K))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (True, False):
        x = torch.randn(M, K)
        x[0, 0] = math.inf if bad else 0
        with torch.autocast("cpu", FP16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        unchanged = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(unchanged) if bad else not any(unchanged)
    assert scaler.get_scale() == 2.0**9


# Shapes, strides, dtypes

# Another tensor of the same values, of whatever strides
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": lambda t: torch.stack((t, t + 1), -1).flatten(-2)[..., ::2],
    "rows of a larger one": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "offset": lambda t: torch.cat((t.new_zeros(1, *t.shape[1:]), t))[1:],
}
SHAPES = [(12,), (4, 3), (2, 3, 2), (1, 12), (2, 1, 3, 2)]


@every_recipe
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", SHAPES, ids=str)
def test_strides_of_input_and_gradient_do_not_matter(recipe: str, layout: str, leading: tuple[int, ...]) -> None:
    """Scenario 17."""
    layer, x, g = layer_of(recipe), torch.randn(*leading, K), torch.randn(*leading, N)
    expected = step(layer, x, g)
    assert torch.equal(LAYOUTS[layout](x), x)
    for x_laid, g_laid in ((LAYOUTS[layout](x), g), (x, LAYOUTS[layout](g))):
        assert_same_bits(step(layer, x_laid, g_laid), expected)


@every_recipe
@pytest.mark.parametrize("shape", [(1, 1), (M, 1), (1, 0)], ids=["all", "a row", "a column"])
def test_expanded_inputs_and_gradients_are_equal_to_contiguous_ones(recipe: str, shape: tuple[int, int]) -> None:
    """Scenario 17: stride 0, as `y.sum().backward()` gives it."""
    layer = layer_of(recipe)
    x, g = (torch.randn(shape[0], shape[1] or n).expand(M, n) for n in (K, N))
    assert 0 in x.stride()
    assert_same_bits(step(layer, x, g), step(layer, x.contiguous(), g.contiguous()))


@every_recipe
def test_leading_dimensions_are_tokens(recipe: str) -> None:
    layer, x, g = layer_of(recipe), torch.randn(24, K), torch.randn(24, N)
    expected = step(layer, x, g)
    for leading in [(4, 6), (2, 3, 4), (1, 2, 3, 4)]:
        result = step(layer, x.view(*leading, K), g.view(*leading, N))
        assert (result["output"].shape, result["input"].shape) == ((*leading, N), (*leading, K))
        result["output"], result["input"] = result["output"].flatten(0, -2), result["input"].flatten(0, -2)
        assert_same_bits(result, expected)


@every_recipe
def test_one_vector_is_one_token(recipe: str) -> None:
    layer, x, g = layer_of(recipe), torch.randn(1, K), torch.randn(1, N)
    result = step(layer, x[0], g[0])
    assert (result["output"].shape, result["input"].shape) == ((N,), (K,))
    result["output"], result["input"] = result["output"][None], result["input"][None]
    assert_same_bits(result, step(layer, x, g))


@every_recipe
@every_dtype
@keep_or_recompute
def test_dtypes_are_those_of_a_linear(recipe: str, dtype: torch.dtype, recompute: bool) -> None:
    layer, plain = layer_of(recipe, dtype=dtype, recompute=recompute), nn.Linear(K, N, dtype=dtype)
    x, g = torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype)
    expected = step(plain, x, g)
    assert {name: t.dtype for name, t in step(layer, x, g).items()} == {name: t.dtype for name, t in expected.items()}


class Mixed(nn.Module):
    """A LayerNorm in between and one layer outside the autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(K, N), nn.LayerNorm(N)
        self.second, self.outside = nn.Linear(N, K), nn.Linear(K, 8)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", dtype):
            y = self.second(self.norm(self.first(x)))
        return self.outside(y.float())


@every_recipe
@keep_or_recompute
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", [FP32, BF16], ids=str)
def test_under_autocast_dtypes_are_a_linears_and_master_gradients_float32(
    recipe: str, recompute: bool, dtype: torch.dtype, given: torch.dtype
) -> None:
    """Scenario 36. Eagerly too, where torchao's `rowwise_with_gw_hp` raises."""
    plain = Mixed()
    model = Mixed()
    model.load_state_dict(plain.state_dict())
    f8.convert_to_float8_training(model, config=recipe, recompute_weight_cast=recompute)
    x = torch.randn(M, K, dtype=given)
    outputs: dict[nn.Module, list[Tensor]] = {}
    for each in (plain, model):
        outputs[each] = []
        for child in each.children():
            child.register_forward_hook(lambda _, args, y, seen=outputs[each]: seen.append(y))
        x_leaf = x.clone().requires_grad_()
        each(x_leaf, dtype).sum().backward()
        assert x_leaf.grad is not None
        outputs[each].append(x_leaf.grad)
        assert all(p.grad is not None and p.grad.dtype is FP32 for p in each.parameters())
    assert [t.dtype for t in outputs[model]] == [t.dtype for t in outputs[plain]]
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 0.2 * theirs.grad.norm(), name


@every_recipe
def test_autocast_switched_off_inside_is_off(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(M, K)
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        y = layer(x)
    assert y.dtype is FP32
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_another_dtype_is_refused_with_the_layers_name_and_the_remedy(dtype: torch.dtype, autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(K, N))
    f8.convert_to_float8_training(model)
    message = rf"Float8Linear '0': the input is {dtype}, .* cast the input, or leave this layer out with"
    with torch.autocast("cpu", BF16, enabled=autocast), pytest.raises(TypeError, match=message):
        model(torch.ones(M, K).to(dtype))


@pytest.mark.parametrize("shape", [(M, K + 1), (K, M), (2, 3, 1), (N,), (0, K + 1)], ids=str)
def test_another_last_dimension_is_refused_with_the_layers_name_and_both_numbers(shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"head": nn.Linear(K, N)})
    f8.convert_to_float8_training(model)
    message = rf"Float8Linear 'head': the input's last dimension is {shape[-1]} in \({shape[0]},.*in_features is {K}"
    with pytest.raises(ValueError, match=message):
        model["head"](torch.ones(shape))


def test_a_layer_without_a_name_is_called_by_its_class() -> None:
    with pytest.raises(TypeError, match=r"^Float8Linear: the input is torch.float64"):
        layer_of("tensorwise")(torch.ones(M, K, dtype=torch.float64))


def test_a_number_is_no_row_of_features() -> None:
    with pytest.raises(ValueError, match=r"Float8Linear: the input.*in_features is 48"):
        layer_of("tensorwise")(torch.tensor(1.0))


# Autograd's other doors


def one_loss(layer: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    return lambda parameters, x=x: torch.func.functional_call(layer, parameters, (x,)).square().sum()


@every_recipe
@keep_or_recompute
def test_func_grad_is_backward_to_the_bit(recipe: str, recompute: bool) -> None:
    """Scenario 39."""
    layer, x = layer_of(recipe, recompute=recompute), torch.randn(M, K)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    by_func, x_grad = torch.func.grad(one_loss(layer, x), argnums=(0, 1))(parameters, x)
    y = layer(x_leaf := x.clone().requires_grad_())
    y.square().sum().backward()
    assert x_leaf.grad is not None
    assert torch.equal(x_grad, x_leaf.grad)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(by_func[name], parameter.grad)


@every_recipe
def test_vmap_says_in_one_sentence_that_it_is_not_supported(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(3, M, K)
    message = "vmap over a Float8Linear is not supported, since a scale belongs to a whole batch: use float8_disabled"
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(layer)(x)
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(torch.func.grad(lambda x: layer(x).sum()))(x)
    with f8.float8_disabled(layer):
        assert torch.vmap(layer)(x).shape == (3, M, N)


@every_recipe
def test_a_second_derivative_says_in_one_sentence_that_it_is_not_supported(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(M, K, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()
    with f8.float8_disabled(layer):
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        first.sum().backward()


@every_recipe
def test_a_second_derivative_through_func_is_refused_and_never_a_silent_zero(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(M, K)

    def first(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x).square().sum())(x).sum()

    with pytest.raises(RuntimeError, match="twice"):
        torch.func.grad(first)(x)


@every_recipe
def test_forward_mode_is_refused(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(M, K)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(layer, (x,), (x,))


@every_recipe
@keep_or_recompute
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_in_anomaly_mode_a_step_passes_and_a_real_nan_is_reported(recipe: str, recompute: bool) -> None:
    """Scenario 38: neither zeros, nor zero tokens, nor tiny numbers make a NaN."""
    layer = layer_of(recipe, recompute=recompute)
    with torch.autograd.detect_anomaly():
        for x in (torch.randn(M, K), torch.zeros(M, K), torch.empty(0, K), torch.full((M, K), 1e-38)):
            layer(x.requires_grad_()).square().sum().backward()
        y = layer(torch.randn(M, K, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"Float8LinearFunctionBackward.*returned nan values"):
            y.backward(torch.full((M, N), math.nan))


@every_recipe
def test_two_backward_passes_through_a_retained_graph_accumulate(recipe: str) -> None:
    layer, x = layer_of(recipe), torch.randn(M, K)
    y = layer(x)
    y.sum().backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    y.sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, 2 * once[name])


@every_recipe
@keep_or_recompute
def test_a_weight_changed_between_forward_and_backward_is_noticed(recipe: str, recompute: bool) -> None:
    """Where backward casts it again. A kept cast is forward's, so there it does not matter."""
    layer, x = layer_of(recipe, recompute=recompute), torch.randn(M, K, requires_grad=True)
    before = step(layer, x, torch.ones(M, N))["input"]
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    if recompute:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, before)


# What is float8 already


@every_recipe
@pytest.mark.parametrize("leading", [(M,), (4, 4)], ids=str)
def test_a_float8_input_is_taken_as_it_is(recipe: str, leading: tuple[int, ...]) -> None:
    layer, x, g = layer_of(recipe), torch.randn(*leading, K), torch.randn(*leading, N)
    x8 = cast(x, layer.recipe.output.left)
    with Watch() as watch:
        y = layer(x8)
    assert Counter(watch.casts) == {(N, K): 1}
    assert torch.equal(y, layer(x))
    y.backward(g)
    expected = step(layer, x if recipe in ONE_CAST else x8.dequantize(), g)  # else its other cast starts from x8
    for name, p in layer.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name]), name


class HandsOnFloat8(torch.autograd.Function):
    """The identity, whose backward casts: what a Float8Linear above could hand to the one below."""

    @staticmethod
    def forward(y: Tensor, how: f8.Cast) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return cast(g, ctx.how), None


@every_recipe
@pytest.mark.parametrize("bias", [False, True])
def test_a_float8_gradient_is_taken_as_it_is(recipe: str, bias: bool) -> None:
    """Scenario 19: one cast, not two."""
    layer, g, x = layer_of(recipe, bias), torch.randn(M, N), torch.randn(M, K, requires_grad=True)
    how = layer.recipe.grad_input.left
    with Watch() as watch:
        HandsOnFloat8.apply(layer(x), how).backward(g)
    expected = step(layer, x, g)
    assert x.grad is not None
    assert torch.equal(x.grad, expected["input"])
    casts_of_g = Counter(watch.casts)[(M, N)]
    assert casts_of_g == (2 if recipe == "rowwise" else 1)  # rows of g.T have scales of their own
    assert layer.weight.grad is not None
    if recipe in ONE_CAST:
        assert torch.equal(layer.weight.grad, expected["weight"])
    assert (layer.weight.grad - expected["weight"]).norm() <= 0.06 * expected["weight"].norm()
    if bias:
        assert layer.bias.grad is not None
        torch.testing.assert_close(layer.bias.grad, cast(g, how).dequantize().sum(0))


# Building one


@every_recipe
@keep_or_recompute
def test_it_is_built_like_a_linear_with_a_recipe(recipe: str, recompute: bool) -> None:
    layer = f8.Float8Linear(
        K, N, False, torch.device("cpu"), BF16, recipe=f8.Recipe.from_name(recipe), recompute_weight_cast=recompute
    )
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype, layer.bias) == ((N, K), BF16, None)
    assert (layer.recipe, layer.recompute_weight_cast) == (f8.Recipe.from_name(recipe), recompute)
    torch.manual_seed(1)
    ours = f8.Float8Linear(K, N, recipe=recipe)
    torch.manual_seed(1)
    assert torch.equal(ours.weight, nn.Linear(K, N).weight)


def test_a_recipe_that_nobody_knows_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'rowwize': the recipes are tensorwise, rowwise"):
        f8.Float8Linear(K, N, recipe="rowwize")


@every_recipe
def test_the_recipe_may_be_replaced_at_any_time(recipe: str) -> None:
    layer, x, g = layer_of("tensorwise"), torch.randn(M, K), torch.randn(M, N)
    layer.recipe = f8.Recipe.from_name(recipe)
    fresh = layer_of(recipe)
    fresh.load_state_dict(layer.state_dict())
    assert_same_bits(step(layer, x, g), step(fresh, x, g))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "in_features=48, out_features=32, bias=True, recipe=rowwise"),
        ({"recompute_weight_cast": False}, "bias=True, recipe=rowwise, recompute_weight_cast=False"),
        ({"enabled": False}, "bias=True, recipe=rowwise, disabled"),
    ],
)
def test_it_says_what_it_is(change: dict[str, Any], text: str) -> None:
    layer = layer_of("rowwise")
    for name, value in change.items():
        setattr(layer, name, value)
    assert repr(layer).startswith("Float8Linear(")
    assert repr(layer).endswith(f"{text})")
