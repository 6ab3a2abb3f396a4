"""timm: a ViT and a ConvNeXt are converted, trained, compiled, averaged and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from ecosystem_checks import (
    REASON,
    assert_every_linear_is_float8,
    assert_is_put_back,
    assert_trains_as_plain,
    calibrated,
    converted,
    every_recipe,
    left_out,
    train,
)
from torch import Tensor, nn

import float8_compile as f8

timm = pytest.importorskip("timm", reason=REASON)
timm_optim = pytest.importorskip("timm.optim", reason=REASON)
timm_utils = pytest.importorskip("timm.utils", reason=REASON)

pytestmark = pytest.mark.usefixtures("afresh")

_generator = torch.Generator().manual_seed(1)
IMAGES = torch.randn(32, 3, 32, 32, generator=_generator)
CLASSES = torch.randint(0, 10, (32,), generator=_generator)


def vit(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **{**sizes, **changes})


def convnext(**changes: Any) -> Any:
    """Its MLPs see (batch, height, width, channels)."""
    torch.manual_seed(0)
    sizes = {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64), "num_classes": 10}
    return timm.create_model("convnext_tiny", pretrained=False, **{**sizes, **changes})


def image_loss(run: Any) -> Tensor:
    return nn.functional.cross_entropy(run(IMAGES), CLASSES)


Build = Callable[..., Any]
MODELS: dict[str, Build] = {"ViT": vit, "ConvNeXt": convnext}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
LINEARS = {
    "ViT": [
        *(f"blocks.{n}.{name}" for n in range(2) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
        "head",
    ],
    "ConvNeXt": [*(f"stages.{n}.blocks.0.mlp.{name}" for n in range(4) for name in ("fc1", "fc2")), "head.fc"],
}


@every_recipe
@every_model
def test_its_loss_falls_as_the_plain_models_does(build: Build, recipe: str) -> None:
    plain = build()
    model = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    assert_trains_as_plain(model, plain, image_loss, within=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_is_converted_and_multiplies_in_float8(name: str) -> None:
    assert_every_linear_is_float8(f8.convert_to_float8_training(MODELS[name]()), LINEARS[name], image_loss)


def test_a_convnext_whose_mlps_are_convolutions_has_one_linear() -> None:
    """The smaller ones of timm are built so (`conv_mlp=True`); pass False to have float8 in them."""
    model = f8.convert_to_float8_training(convnext(conv_mlp=True))
    assert converted(model) == ["head.fc"]
    assert isinstance(model.stages[0].blocks[0].mlp.fc1, nn.Conv2d)


def test_a_new_classifier_is_no_float8_layer_and_the_report_says_so() -> None:
    model = f8.convert_to_float8_training(vit())
    model.reset_classifier(5)
    assert left_out(model) == {"head": "never converted"}


@pytest.mark.parametrize(
    ("build", "recipe"), [(lambda: vit(depth=1), "delayed"), (convnext, "tensorwise")], ids=["ViT", "ConvNeXt"]
)
def test_compiled_it_is_one_graph_and_trains_as_eagerly(build: Build, recipe: str) -> None:
    model = f8.convert_to_float8_training(build(), config=recipe)
    if recipe == "delayed":
        calibrated(model, image_loss)
    eager = copy.deepcopy(model)
    run, counter = compile_counted(model)
    assert train(model, image_loss, steps=3, run=run) == train(eager, image_loss, steps=3)
    assert counter.frame_count == 1


def test_gradient_checkpointing_changes_no_number_of_delayed_scaling() -> None:
    model = f8.convert_to_float8_training(vit(), config="delayed")
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    assert train(other, image_loss) == train(model, image_loss)
    for ours, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "muon"])
def test_timms_optimizers_move_delayed_scales_on(name: str) -> None:
    model = f8.convert_to_float8_training(vit(), config="delayed")
    losses = train(model, image_loss, steps=3, optimizer=timm_optim.create_optimizer_v2(model, opt=name, lr=1e-3))
    assert losses[-1] < losses[0]
    assert model.head.input_scale.amax_history.count_nonzero() == 3


@pytest.mark.parametrize("scales", ["none yet", "calibrated", "calibrated, then reset"])
def test_an_average_of_a_delayed_model_is_right_though_its_scales_never_move(scales: str) -> None:
    """timm's EMA writes into all that the state dict has. An average without scales casts by dynamic ones."""
    model = f8.convert_to_float8_training(vit(), config="delayed")
    if scales != "none yet":
        calibrated(model, image_loss)
    average = timm_utils.ModelEmaV3(model, decay=0.5)
    if scales == "calibrated, then reset":
        f8.reset_delayed_scaling(average.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        train(model, image_loss, steps=1, optimizer=optimizer)
        average.update(model)
    ema = average.module.eval()
    assert bool(ema.head.input_scale.scale > 0) == (scales == "calibrated")
    with f8.float8_disabled(ema):
        expected = ema(IMAGES)
    difference = ema(IMAGES) - expected
    assert 0 < difference.norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@every_model
def test_put_back_it_is_the_librarys_model_again(build: Build, recipe: str) -> None:
    plain = build()
    model = f8.convert_to_float8_training(build(), config=recipe)
    parameters = dict(model.named_parameters())
    train(model, image_loss, steps=2)
    with f8.float8_disabled(model.eval()):
        expected = model(IMAGES)
    build().load_state_dict(f8.plain_state_dict(model), strict=True)
    f8.convert_from_float8_training(model)
    assert_is_put_back(model, parameters, plain)
    assert torch.equal(plain.eval()(IMAGES), expected)
