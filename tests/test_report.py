"""What crosses from forward to backward: counted by hand, in every recipe, and nothing else is touched.

The model of most tests is an MLP of M = 32 tokens, K = N = 64 and 256 in between, in bfloat16:

    x (32, 64) -> "0" Linear(64, 256) -> "1" ReLU -> "2" Linear(256, 64)
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from delayed_checks import backward, layers_of, state_of, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from float8_compile import Float8Linear, Recipe, convert_to_float8_training, float8_disabled, mark_calibrated
from float8_compile.report import SavedTensor, SavedTensorsReport, _Forward, readable, saved_tensors_report

E4M3 = torch.float8_e4m3fn
WEIGHT = 64 * 256  # bytes of each layer's float8 weight
HIDDEN = 32 * 256 * 2  # the tensor between the layers, bfloat16
KEEPERS = {"recompute": (), "keep": ("0", "2"), "mix": ("2",)}

every_recipe = pytest.mark.parametrize("recipe", Recipe.names())
every_setting = pytest.mark.parametrize("keepers", KEEPERS.values(), ids=KEEPERS)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mlp(recipe: str = "tensorwise", keepers: tuple[str, ...] = ()) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).bfloat16()
    return convert_to_float8_training(
        model, config=recipe, recompute_weight_cast=lambda linear, fqn: fqn not in keepers
    )


def batch(rows: int = 32, requires_grad: bool = True) -> Tensor:
    return torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=requires_grad)


def without_scales(rows: tuple[SavedTensor, ...]) -> list[tuple[Any, ...]]:
    return sorted((row.layer, row.role, row.dtype, row.shape, row.nbytes) for row in rows if row.role != "scale")


# Counted by hand


@every_recipe
@every_setting
def test_an_mlp_eagerly(recipe: str, keepers: tuple[str, ...]) -> None:
    """x is the caller's and ReLU keeps its output: only where one cast is enough inputs are kept too, in float8."""
    report = saved_tensors_report(mlp(recipe, keepers), batch())
    expected = [("1", "other", torch.bfloat16, (32, 256), HIDDEN)]
    if recipe in ("tensorwise", "delayed"):
        expected += [("0", "input", E4M3, (32, 64), 32 * 64), ("2", "input", E4M3, (32, 256), 32 * 256)]
    kept = [row for row in without_scales(report.eager) if row[1] != "weight"]
    assert kept == sorted(expected)
    weights = {row.layer: row for row in report.eager if row.role == "weight"}
    assert {name: (row.dtype, row.nbytes) for name, row in weights.items()} == dict.fromkeys(keepers, (E4M3, WEIGHT))
    assert without_scales(report.eager_without_float8) == [("1", "other", torch.bfloat16, (32, 256), HIDDEN)]


@every_recipe
@every_setting
def test_an_mlp_compiled(recipe: str, keepers: tuple[str, ...]) -> None:
    """One tensor of the hidden size crosses, the rest is computed again; and x in float8 where backward wants that."""
    report = saved_tensors_report(mlp(recipe, keepers), batch())
    weights = {row.layer: (row.dtype, row.nbytes) for row in report.compiled if row.role == "weight"}
    assert weights == dict.fromkeys(keepers, (E4M3, WEIGHT))
    kept = report.total(role="input") + report.total(role="other")
    assert kept == HIDDEN + (0 if recipe == "rowwise_with_gw_hp" else 32 * 64)
    assert report.total(float8=False) == HIDDEN
    scales = [row for row in report.compiled if row.role == "scale"]
    assert all(row.shape == () or 1 in row.shape for row in scales)
    assert {row.layer for row in report.compiled} <= {"0", "1", "2"}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_scales_of_whole_tensors(recipe: str) -> None:
    """Four bytes each: 1 / scale of the input and of the weight, and of a weight to be cast again the scale too."""
    for keepers in KEEPERS.values():
        report = saved_tensors_report(mlp(recipe, keepers), batch())
        rows = [row for row in report.eager if row.role == "scale"]
        scales = [(name, (), 4) for name in ("0", "2") for _ in range(2 if name in keepers else 3)]
        assert [(row.layer, row.shape, row.nbytes) for row in rows] == scales


def test_the_scales_of_a_kept_rowwise_weight() -> None:
    """One for each column, since backward contracts the other axis."""
    report = saved_tensors_report(mlp("rowwise", ("0", "2")), batch())
    rows = [row for row in report.eager if row.role == "scale"]
    assert [(row.layer, row.shape, row.nbytes) for row in rows] == [("0", (1, 64), 256), ("2", (1, 256), 1024)]


def test_ten_large_layers_eagerly() -> None:
    """Through what is behind `saved_tensors_report`, which would trace them as well. Without the scales' 120 bytes."""
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(10)])
    convert_to_float8_training(model)
    x = torch.randn(16, 4096, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    for recompute in (True, False):
        for layer in model:
            layer.recompute_weight_cast = recompute
        kept[recompute] = sum(row.nbytes for row in _Forward(model, (x,), {}).eager() if row.role != "scale")
    assert kept[False] - kept[True] == 10 * 4096 * 4096 == 167_772_160


@pytest.mark.parametrize("frozen", ["input", "weight", "neither"])
def test_as_many_tokens_as_features(frozen: str) -> None:
    """Input and weight are of one shape then; a frozen one of the two spares the other."""
    layer = Float8Linear(64, 64, bias=True, dtype=torch.bfloat16, recompute_weight_cast=False)
    layer.weight.requires_grad_(frozen != "weight")
    report = saved_tensors_report(layer, batch(64, requires_grad=frozen != "input"))
    expected = {"input": ["input"], "weight": ["weight"], "neither": ["input", "weight"]}[frozen]
    for rows in (report.eager, report.compiled):
        assert sorted(row.role for row in rows if row.dtype == E4M3) == expected
        assert all(row.nbytes == 64 * 64 for row in rows if row.dtype == E4M3)


def test_odd_sizes_are_counted_as_they_are_stored() -> None:
    layer = Float8Linear(20, 36, dtype=torch.bfloat16, recompute_weight_cast=False)
    report = saved_tensors_report(layer, torch.randn(5, 20, dtype=torch.bfloat16, requires_grad=True))
    assert report.total("eager", role="weight") >= 20 * 36
    assert report.total("compiled", role="weight") >= 20 * 36
    assert {row.role for row in report.compiled} <= {"input", "weight", "scale"}


# What counts


class Shared(nn.Module):
    """Three layers that read one tensor, which is no argument of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return self.q(x) + self.k(x) + self.v(x)


def test_a_shared_input_counts_once() -> None:
    """rowwise keeps the input in high precision, so three layers keep the same storage; the first one has it."""
    model = convert_to_float8_training(Shared(), config="rowwise_with_gw_hp")
    report = saved_tensors_report(model, batch(requires_grad=False))
    assert [(row.layer, row.role, row.nbytes) for row in report.eager if row.role != "scale"] == [
        ("q", "input", 32 * 64 * 2)
    ]
    for rows in (report.compiled, report.eager_without_float8, report.compiled_without_float8):
        assert [(row.layer, row.role, row.nbytes) for row in rows] == [("q", "input", 32 * 64 * 2)]


def test_a_view_counts_with_all_that_it_keeps_alive() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()[:16].sin()

    report = saved_tensors_report(Half(), batch())
    assert [(row.shape, row.nbytes) for row in report.eager] == [((32, 64), 32 * 64 * 2)], "exp keeps it, sin a view"


def test_arguments_parameters_and_buffers_are_alive_anyway() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))
            self.register_buffer("table", torch.randn(64))

        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]]) -> Tensor:
            return x * self.weight * self.table * more["a"][0]

    report = saved_tensors_report(Scaled(), torch.randn(4, 64), more={"a": [torch.randn(4, 64)]})
    products = [row for row in report.eager if row.shape != (4, 64)]
    assert products == []
    assert report.total("compiled") == 0


def test_what_the_output_does_not_need_is_not_kept() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.exp().exp()
            return x.sin()

    assert saved_tensors_report(Wasteful(), batch()).eager == ()


def test_nothing_stays_alive_afterwards() -> None:
    def tensors() -> dict[int, Tensor]:
        gc.collect()
        return {id(thing): thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)}

    model, x = mlp(), batch()
    before = tensors()
    saved_tensors_report(model, x)
    assert [tensor for key, tensor in tensors().items() if key not in before and tensor.numel() >= 32 * 64] == []
    before.clear()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_checkpointed_block_keeps_its_input() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.sin(), use_reentrant=False)

    report = saved_tensors_report(Checkpointed(), batch())
    assert [(row.shape, row.nbytes) for row in report.eager] == [((32, 64), 32 * 64 * 2)]
    assert report.total("compiled", role="weight") == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo asks
def test_several_graphs_are_summed() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(keepers=("0", "2")), mlp(keepers=("0", "2"))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x).exp()

    report = saved_tensors_report(Broken(), batch())
    assert [report.total(layer=name, role="weight") for name in ("first.0", "first.2", "second.0", "second.2")] == [
        WEIGHT
    ] * 4
    broken = {row.layer for row in report.compiled}
    assert broken <= {"", *report.layers}


def test_a_weight_that_autocast_casts_is_kept() -> None:
    layer = Float8Linear(64, 32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        report = saved_tensors_report(layer, torch.randn(16, 64, requires_grad=True))
    cast = [(row.role, row.dtype, row.nbytes) for row in report.eager_without_float8]
    assert sorted(cast, key=str) == [
        ("input", torch.bfloat16, 16 * 64 * 2),
        ("weight", torch.bfloat16, 64 * 32 * 2),
    ]


# Delayed scales


@every_setting
def test_once_there_are_delayed_scales_none_is_counted(keepers: tuple[str, ...]) -> None:
    """They belong to the layers and are alive anyway, like parameters; the rest is as without them."""
    model = mlp("delayed", keepers)
    before = saved_tensors_report(model, batch())
    mark_calibrated(model)
    report = saved_tensors_report(model, batch())
    for mode in ("eager", "compiled"):
        assert before.total(mode, role="scale") > 0 == report.total(mode, role="scale")
        assert without_scales(getattr(report, mode)) == without_scales(getattr(before, mode))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_delayed_scales_stay_as_they_were(calibrated: bool, fails: bool) -> None:
    """Running amaxes too, which each of the four forwards would raise, and nothing new is taken for evidence."""
    model = mlp("delayed", ("0",))
    train(model, model, [batch().detach() for _ in range(3)] if calibrated else [])
    backward(model, batch())
    before, evidence = state_of(model), [layer.input_scale.calibrated for layer in layers_of(model)]
    model[1].register_forward_hook(stumble if fails else lambda *_: None)
    larger = (100 * batch()).detach()
    with pytest.raises(LookupError) if fails else contextlib.nullcontext():
        saved_tensors_report(model, larger)
    assert state_of(model).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())
    assert [layer.input_scale.calibrated for layer in layers_of(model)] == evidence == [calibrated] * 2
    if not fails:
        backward(model, larger)
        assert state_of(model)["0.input.amax"] > 10 * before["0.input.amax"], "so it could have been raised"


def stumble(*_: Any) -> Any:
    raise LookupError("half-way")


# Any model


def test_a_model_without_float8() -> None:
    report = saved_tensors_report(nn.Sequential(nn.Linear(64, 32), nn.ReLU()), torch.randn(4, 64))
    assert {row.role for row in report.eager} == {"other"}
    assert report.eager == report.eager_without_float8
    assert report.compiled == report.compiled_without_float8


@dataclass
class Output:
    loss: Tensor
    name: str = "of a dataclass"


@pytest.mark.parametrize(
    "pack",
    [lambda y: y, lambda y: (None, [y]), lambda y: {"loss": (y, 3)}, lambda y: Output(y)],
    ids=["tensor", "tuple", "dict", "dataclass"],
)
def test_outputs_of_every_kind(pack: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = Float8Linear(64, 32, dtype=torch.bfloat16, recompute_weight_cast=False)

        def forward(self, x: Tensor) -> Any:
            return pack(self.up(x))

    report = saved_tensors_report(Model(), batch())
    assert report.total("eager", role="weight") == report.total(role="weight") == 64 * 32


def test_a_model_that_is_compiled_already() -> None:
    plain = saved_tensors_report(mlp(keepers=("2",)), batch())
    in_place = mlp(keepers=("2",))
    in_place.compile(backend="eager")
    by_layer = mlp(keepers=("2",))
    by_layer[2] = torch.compile(by_layer[2], backend="eager")
    for model in (torch.compile(mlp(keepers=("2",)), backend="eager"), in_place, by_layer):
        report = saved_tensors_report(model, batch())
        assert report.eager == plain.eager
        assert report.total(role="weight") == WEIGHT
        assert set(report.layers) == {"", "0", "1", "2"}


def test_a_model_in_eval_mode_and_under_no_grad() -> None:
    model = mlp().eval()
    with torch.no_grad():
        report = saved_tensors_report(model, batch())
        assert not torch.is_grad_enabled()
    assert report.total("eager") > 0
    assert not model.training


# Nothing else changes


class Stateful(nn.Module):
    """Moves buffers, draws random numbers, and fails when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y = self.drop(self.norm(self.up(x)))
        if self.fails:
            raise RuntimeError("asked to fail")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_stay(fails: bool) -> None:
    model = convert_to_float8_training(Stateful())
    model(torch.randn(8, 64)).sum().backward()
    model.fails = fails
    state, calls = copy.deepcopy(model.state_dict()), model.calls
    grads = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    attributes = [{k: copy.copy(v) for k, v in vars(m).items()} for m in model.modules()]
    random, x = torch.get_rng_state(), torch.randn(8, 64)
    torch.set_rng_state(random)
    with pytest.raises(RuntimeError, match="asked to fail") if fails else contextlib.nullcontext():
        saved_tensors_report(model, x)
    assert all(
        torch.equal(before, after) for before, after in zip(state.values(), model.state_dict().values(), strict=True)
    )
    assert model.calls is calls
    assert all(p.grad is g and torch.equal(g, b) for p, (g, b) in zip(model.parameters(), grads, strict=True))
    assert [vars(m).keys() for m in model.modules()] == [a.keys() for a in attributes]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert model.up.enabled
    assert torch.equal(torch.get_rng_state(), random)


def test_what_was_compiled_before_is_not_compiled_again() -> None:
    model, x = mlp(), batch()
    compilations: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(x)
    for _ in range(10):  # more than Dynamo's recompile_limit
        report = saved_tensors_report(nn.Sequential(Float8Linear(16, 16)), torch.randn(4, 16))
        assert {row.layer for row in report.compiled} == {"0"}
    saved_tensors_report(model, x)
    compiled(x)
    assert len(compilations) == 1


def test_other_shapes_do_not_make_it_dynamic() -> None:
    model = mlp(keepers=("0",))
    small, large = (saved_tensors_report(model, batch(rows)) for rows in (16, 48))
    assert 3 * small.total(role="other") == large.total(role="other")


def test_no_setting_changes() -> None:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    before = [config.get_config_copy() for config in configs]
    saved_tensors_report(mlp(), batch())
    assert [config.get_config_copy() for config in configs] == before


# Errors


def test_no_module() -> None:
    with pytest.raises(
        TypeError, match=r"saved_tensors_report\(model, \*args\) needs an nn.Module first, got function"
    ):
        saved_tensors_report(lambda x: x, batch())


@pytest.mark.parametrize("how", ["frozen", "detached", "integers"])
def test_nothing_requires_a_gradient(how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = Float8Linear(64, 32, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return y.detach() if how == "detached" else y.argmax(-1) if how == "integers" else y

    model = Model().requires_grad_(how != "frozen")
    with pytest.raises(ValueError, match=r"no output of the model requires a gradient.*let a parameter or an argument"):
        saved_tensors_report(model, batch(requires_grad=False))
    assert model.up.enabled


def test_totals_of_what_there_is_not() -> None:
    report = SavedTensorsReport(("", "up"), (), (), (), ())
    with pytest.raises(ValueError, match=r"'lazy'.*'eager', 'compiled'"):
        report.total("lazy")
    with pytest.raises(ValueError, match=r"'weights'.*'input', 'weight', 'scale', 'other'"):
        report.total(role="weights")
    with pytest.raises(ValueError, match=r"'down'.*'', 'up'"):
        report.total(layer="down")


# Printing


def test_the_table() -> None:
    eager = (
        SavedTensor("up", "input", E4M3, (32, 64), 2048),
        SavedTensor("up", "scale", torch.float32, (), 4),
        SavedTensor("up", "scale", torch.float32, (), 4),
        SavedTensor("", "other", torch.bfloat16, (32, 256), 16384),
    )
    compiled = (SavedTensor("up", "weight", E4M3, (256, 64), 16384),)
    report = SavedTensorsReport(("", "up", "unseen"), eager, compiled, eager[3:], ())
    assert str(report) == (
        "layer, tensor  dtype          shape         eager  compiled\n"
        "-------------  -------------  ---------  --------  --------\n"
        "(the model)                               16.4 kB         -\n"
        "  other        bfloat16       (32, 256)   16.4 kB         -\n"
        "up                                         2.1 kB   16.4 kB\n"
        "  input        float8_e4m3fn  (32, 64)     2.0 kB         -\n"
        "  weight       float8_e4m3fn  (256, 64)         -   16.4 kB\n"
        "  scale        float32        2 of ()         8 B         -\n"
        "total                                     18.4 kB   16.4 kB\n"
        "  input                                    2.0 kB         -\n"
        "  weight                                        -   16.4 kB\n"
        "  scale                                       8 B         -\n"
        "  other                                   16.4 kB         -\n"
        "eager 18.4 kB (without float8: 16.4 kB), compiled 16.4 kB (without float8: -)\n"
        "Parameters, buffers and arguments are alive anyway and not counted; a storage counts once."
    )


def test_the_table_of_a_model_that_keeps_nothing() -> None:
    assert "total" in str(SavedTensorsReport(("",), (), (), (), ()))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "-"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (167_772_160, "167.8 MB"),
        (80 * 10**9, "80.0 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


def test_a_report_is_data() -> None:
    report = saved_tensors_report(mlp(keepers=("2",)), batch())
    assert report.total("eager") == sum(row.nbytes for row in report.eager)
    assert report.total() == report.total("compiled") == sum(report.total(layer=layer) for layer in report.layers)
    with pytest.raises(FrozenInstanceError):
        report.eager[0].nbytes = 0
    with float8_disabled(model := mlp()):
        assert saved_tensors_report(model, batch()).total("eager") == HIDDEN
