"""The converter for torchtitan, on the interface that torchtitan publishes; torchtitan itself is not installed here."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fresh_process import run_python
from torch import nn
from torch.nn import functional as F

import float8_compile as f8
from float8_compile import Float8Linear, Recipe
from float8_compile.integrations.torchtitan import Float8LinearConverter

# What pytorch/torchtitan publishes, in small: `Configurable` is torchtitan/config/configurable.py, `Module`
# torchtitan/protocols/module.py and `Linear` torchtitan/models/common/linear.py of its release 0.3.0. `NewLinear` and
# `ColumnParallelLinear` are the last one's at commit 002b61b17619160550b294ba8d02c446b8af2000, after that release.


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def to_dict(self) -> dict[str, Any]:
            def plain(value: Any) -> Any:
                if isinstance(value, list):
                    return [plain(one) for one in value]
                return value.to_dict() if hasattr(value, "to_dict") else value

            return {one.name: plain(getattr(self, one.name)) for one in fields(self) if one.name[0] != "_"}

        def traverse(self, kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
            if isinstance(self, kind):
                yield prefix, self, None, None
                return
            for one in fields(self):
                value, fqn = getattr(self, one.name), f"{prefix}.{one.name}" if prefix else one.name
                places = (
                    [(f"{fqn}.{i}", item, value, i) for i, item in enumerate(value)]
                    if isinstance(value, list)
                    else [(fqn, value, self, one.name)]
                )
                for name, item, parent, key in places:
                    if isinstance(item, kind):
                        yield name, item, parent, key
                    elif isinstance(item, Configurable.Config):
                        yield from item.traverse(kind, name)

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            config: Any = vars(cls)["Config"]
            assert "__slots__" in vars(config)
            assert all(one.kw_only for one in fields(config))
            config._owner = cls


class Module(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: Callable[[torch.Tensor], Any] | None = None

        def build(self, **kwargs: Any) -> Any:
            instance = Configurable.Config.build(self, **kwargs)
            instance.param_init = self.param_init
            return instance


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class LoRALinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class NewLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        num_linears: int = 1

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input, weight, bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._linear(input, self.weight, self.bias)


class ColumnParallelLinear(NewLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(NewLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        gathered = 2 * input  # in place of an all-gather
        return self._linear(gathered, self.weight, self.bias)


class FeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w2 = config.w1.build(), config.w2.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(F.silu(self.w1(x)))


class Model(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[FeedForward.Config]
        lm_head: Linear.Config
        is_tied: bool = False

        def update_from_config(self, *, config: Any) -> None:
            pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(48, 32)
        self.layers = nn.ModuleList([layer.build() for layer in config.layers])
        self.lm_head = config.lm_head.build()
        if config.is_tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    published = ModuleType("torchtitan.models.common.linear")
    vars(published).update(names)
    common = ModuleType("torchtitan.models.common")
    vars(common)["linear"] = published
    for name in ("torchtitan", "torchtitan.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, common.__name__, common)
    monkeypatch.setitem(sys.modules, published.__name__, published)


@pytest.fixture(autouse=True)
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Linear=Linear)


def model_config(hidden: int = 64, **kwargs: Any) -> Model.Config:
    def layer() -> FeedForward.Config:
        up = Linear.Config(in_features=32, out_features=hidden, bias=True, param_init=nn.init.zeros_)
        return FeedForward.Config(w1=up, w2=Linear.Config(in_features=hidden, out_features=32))

    return Model.Config(layers=[layer(), layer()], lm_head=Linear.Config(in_features=32, out_features=48), **kwargs)


def converted(config: Any = None, **options: Any) -> Any:
    return Float8LinearConverter.Config(**options).build().convert(model_config() if config is None else config)


def layers_of(model: nn.Module) -> dict[str, Float8Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}


# What is converted


def test_the_model_is_built_with_float8_layers() -> None:
    config = model_config()
    result = converted(config, filter_fqns=["lm_head"])
    assert result is config
    model = result.build()
    assert list(layers_of(model)) == ["layers.0.w1", "layers.0.w2", "layers.1.w1", "layers.1.w2"]
    assert [layer.fqn for layer in layers_of(model).values()] == list(layers_of(model))
    assert all(isinstance(layer, Linear) for layer in layers_of(model).values()), "torchtitan wants each a Module"
    assert model.layers[0].w1.param_init is nn.init.zeros_
    assert model.layers[0].w1.bias is not None
    assert type(model) is Model


@pytest.mark.parametrize("name", Recipe.names())
@pytest.mark.parametrize("emulate", [False, True])
def test_recipes_go_by_name(name: str, emulate: bool) -> None:
    model = converted(recipe_name=name, emulate=emulate).build()
    expected = replace(Recipe.from_name(name), emulate=emulate)
    assert {layer.recipe for layer in layers_of(model).values()} == {expected}
    model(torch.arange(48).view(3, 16)).square().mean().backward()


def test_it_computes_what_a_converted_model_computes() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = converted(recipe_name="rowwise").build()
        plain = model_config().build()
    tokens = torch.arange(48).view(3, 16)
    plain.load_state_dict(built.state_dict())
    for layer in [module for module in plain.modules() if isinstance(module, Linear)]:
        layer.__class__ = nn.Linear
    f8.convert_to_float8_training(plain, config="rowwise")
    assert torch.equal(built(tokens), plain(tokens))


def test_options_of_torchtitan_are_taken() -> None:
    options = {"model_compile_enabled": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    assert len(layers_of(converted(**options).build())) == 5


def test_weights_are_kept_where_told() -> None:
    assert not any(
        layer.recompute_weight_cast for layer in layers_of(converted(recompute_weight_cast=False).build()).values()
    )
    within = converted(recompute_weight_cast="auto", weight_cast_budget=2 * 32 * 64, recipe_name="tensorwise").build()
    assert sum(not layer.recompute_weight_cast for layer in layers_of(within).values()) == 2


# What is left out, and why


def test_layers_that_would_be_padded_are_left_out() -> None:
    assert list(layers_of(converted(model_config(hidden=40)).build())) == ["lm_head"]


def test_small_layers_are_left_out_on_request() -> None:
    config = model_config()
    config.layers[1].w1 = Linear.Config(in_features=4096, out_features=4096)
    model = converted(config, recipe_name="tensorwise", filter_fqns=["auto_filter_small_kn", "lm_head"])
    assert [name for name, one, _, _ in model.traverse(Linear.Config) if type(one) is not Linear.Config] == [
        "layers.1.w1"
    ]


def test_a_name_that_matches_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match="skip='output' matches no linear layer"):
        converted(filter_fqns=["output"])


@pytest.mark.parametrize(
    ("config", "options", "reasons"),
    [
        (
            model_config(hidden=40),
            {"filter_fqns": ["lm_head"]},
            ["layers.0.w1: K=32, N=40: not multiples", "skipped by"],
        ),
        (model_config(), {"filter_fqns": ["auto_filter_small_kn"]}, ["lm_head: too little to gain: x 0"]),
        (LoRALinear.Config(in_features=32, out_features=32), {}, [r"\(root\): LoRALinear is a subclass of nn.Linear"]),
        (Module.Config(), {}, ["there is no linear in it"]),
    ],
)
def test_nothing_converted_is_an_error(config: Any, options: Any, reasons: list[str]) -> None:
    for reason in reasons:
        with pytest.raises(ValueError, match=f"(?s)no layer was converted to float8.*{reason}"):
            converted(config, **options)


def test_of_many_layers_ten_are_named() -> None:
    config = model_config(hidden=40)
    config.layers *= 3
    with pytest.raises(ValueError, match=r"layers.4.w2: [^\n]*\n  and 3 more$"):
        converted(config, filter_fqns=["lm_head"])


def test_an_unknown_recipe_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'float4': the recipes are tensorwise"):
        Float8LinearConverter.Config(recipe_name="float4").build()


def test_a_gpu_without_float8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"A100 \(compute capability 8.0\) has no float8 GEMM.*emulate=True"):
        Float8LinearConverter.Config().build()
    Float8LinearConverter.Config(emulate=True).build()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Float8LinearConverter.Config().build()


# The config tree


def test_a_lone_linear_is_replaced() -> None:
    root = Linear.Config(in_features=32, out_features=32)
    layer = converted(root).build()
    assert isinstance(layer, Float8Linear)
    assert layer.fqn == ""


def test_the_config_can_be_copied_and_written() -> None:
    config = converted(recipe_name="delayed", filter_fqns=["lm_head"])
    plain = model_config()
    for one in (plain, config):
        for layer in one.layers:
            layer.w1.param_init = None
    assert json.dumps(config.to_dict()) == json.dumps(plain.to_dict())
    assert list(layers_of(copy.deepcopy(config).build())) == list(layers_of(config.build()))
    assert isinstance(config, Model.Config)


def test_a_subclass_of_a_float8_layer_is_float8() -> None:
    """As torchtitan/components/lora.py makes one of whatever layer it finds."""
    config = converted(recipe_name="tensorwise").lm_head
    base = type(config)._owner

    class Adapted(base):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            rank: int

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    adapted = Adapted.Config(**{one.name: getattr(config, one.name) for one in fields(config)}, rank=2).build()
    x = torch.randn(16, 32)
    plain = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 48, bias=False)), config="tensorwise")
    plain[0].load_state_dict(adapted.state_dict())
    assert torch.equal(adapted(x), plain(x) + 1)


# Of the whole model


def test_delayed_scales_share_their_vectors() -> None:
    with torch.device("meta"):
        model = converted(recipe_name="delayed").build()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    layers = list(layers_of(model).values())
    assert len({id(layer.input_scale.scales) for layer in layers if layer.input_scale is not None}) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(48).view(3, 16)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    scales = [scale for layer in layers for scale in (layer.input_scale, layer.grad_output_scale, layer.weight_scale)]
    assert all(scale is not None and scale.calibrated and scale.scale > 0 for scale in scales)


def test_models_of_one_config_have_scales_of_their_own() -> None:
    config = converted(recipe_name="delayed")
    first, second = config.build().lm_head.input_scale, config.build().lm_head.input_scale
    assert first.scales is not second.scales


def parallel(pipeline: int = 1, tensor: int = 1, backend: str = "spmd_types") -> SimpleNamespace:
    degrees = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor}
    return SimpleNamespace(parallelism=SimpleNamespace(**degrees, spmd_backend=backend))


@pytest.mark.parametrize(
    ("recipe", "config", "error"),
    [
        ("delayed", parallel(pipeline=2), "set pipeline_parallel_degree=1 or another recipe_name"),
        ("rowwise", parallel(tensor=2, backend="partial_dtensor"), "set spmd_backend='spmd_types'"),
        ("rowwise", parallel(backend="full_dtensor"), "set spmd_backend='spmd_types'"),
    ],
)
def test_what_cannot_run_in_parallel_is_an_error(recipe: str, config: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        converted(recipe_name=recipe).update_from_config(config=config)


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("delayed", parallel(tensor=2)),
        ("rowwise", parallel(pipeline=2, tensor=2)),
        ("rowwise", parallel(backend="partial_dtensor")),
    ],
)
def test_other_parallelism_is_torchtitans(recipe: str, config: Any) -> None:
    converted(recipe_name=recipe).update_from_config(config=config)


def test_weights_are_gathered_in_float8_but_for_a_tied_one() -> None:
    model = converted(model_config(is_tied=True), enable_fsdp_float8_all_gather=True).build()
    gathered = {name: layer.recipe.fsdp_float8_all_gather for name, layer in layers_of(model).items()}
    assert gathered.pop("lm_head") is False
    assert gathered == dict.fromkeys(gathered, True)
    assert type(model.tok_embeddings.weight) is nn.Parameter


# Other versions of torchtitan


def test_after_0_3_the_layers_own_forward_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Linear=NewLinear, ColumnParallelLinear=ColumnParallelLinear)
    config = FeedForward.Config(
        w1=ColumnParallelLinear.Config(in_features=32, out_features=64, bias=True),
        w2=NewLinear.Config(in_features=64, out_features=32),
    )
    built = converted(config, recipe_name="tensorwise").build()
    assert list(layers_of(built)) == ["w1", "w2"]
    plain = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 64)), config="tensorwise")
    plain[0].load_state_dict(built.w1.state_dict())
    x = torch.randn(16, 32)
    assert torch.equal(built.w1(x), plain(2 * x))


def test_after_0_3_stacked_linears_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Linear=NewLinear)
    with pytest.raises(ValueError, match="StackedLinear is a subclass"):
        converted(NewLinear.Config(in_features=32, out_features=32, num_linears=2))


def test_until_0_2_a_model_is_converted() -> None:
    """`convert(model)`, `post_optimizer_hook(model)`: torchtitan/protocols/model_converter.py of its release 0.2.2."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    converter = Float8LinearConverter.Config(recipe_name="delayed", filter_fqns=["1"]).build()
    assert converter.convert(model) is model
    assert list(layers_of(model)) == ["0"]
    before = model.state_dict(keep_vars=True)
    converter.post_optimizer_hook([model])
    assert before.keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="0: skipped by name"):
        Float8LinearConverter.Config(filter_fqns=["0", "1"]).build().convert(
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        )


# What importing it brings


def test_it_imports_neither_torchtitan_nor_torchao() -> None:
    code = "import float8_compile.integrations.torchtitan; print('imported')"
    assert run_python(code, blocked=("torchtitan", "torchao")) == "imported"
    assert run_python("import float8_compile; print('float8_compile.integrations' in sys.modules)") == "False"
