"""PEFT: LoRA on a converted model, or converted with its adapters; trained, saved, merged.

Convert first, then `get_peft_model`: the base runs in float8 and the adapters don't, whose rank is no size for a float8
GEMM. The other way round `module_filter_fn` leaves the adapters out.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from ecosystem_checks import (
    IDS,
    REASON,
    Float8Gemms,
    assert_near,
    calibrated,
    converted,
    every_recipe,
    language_loss,
    left_out,
    llama,
    train,
)
from torch import nn

import float8_compile as f8

peft = pytest.importorskip("peft", reason=REASON)
pytest.importorskip("transformers", reason=REASON)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=REASON)

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    # peft asks transformers in words that transformers gives up
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TARGETS = ["q_proj", "v_proj"]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def with_lora(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=TARGETS, **options))


def base(**changes: Any) -> Any:
    return llama(tie_word_embeddings=False, **changes)


def lora_on_converted(recipe: str) -> Any:
    return with_lora(f8.convert_to_float8_training(base(), config=recipe))


def adapters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if ".lora_A." in name or ".lora_B." in name]


# LoRA on a converted model


@every_recipe
def test_only_the_adapters_train_on_a_base_that_runs_in_float8(recipe: str) -> None:
    plain = with_lora(base())
    model = lora_on_converted(recipe)
    before = copy.deepcopy(model.state_dict())
    assert set(converted(model)) == set(converted(f8.convert_to_float8_training(copy.deepcopy(plain)))) - set(
        adapters(model)
    )
    assert left_out(model) == dict.fromkeys(adapters(model), "never converted")

    assert_near(train(model, language_loss), train(plain, language_loss), within=0.01)
    moved = {name for name, tensor in f8.plain_state_dict(model).items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name in adapters(model)}


@every_recipe
def test_an_adapter_that_begins_with_zeros_gives_no_nan(recipe: str) -> None:
    """Scenario 11, with the adapters in float8 too: B is all zeros, and so is the gradient of A."""
    model = f8.convert_to_float8_training(with_lora(base()), config=recipe)
    before = language_loss(model)
    before.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[1][0] for name, g in gradients.items() if g.count_nonzero()} == {"B"}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    train(model, language_loss, steps=3)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert language_loss(model) < before


def test_a_frozen_weight_costs_two_gemms() -> None:
    """Of the first layer's k only the forward runs: nothing below it trains."""
    model = lora_on_converted("tensorwise")
    with Float8Gemms() as gemms:
        language_loss(model).backward()
    assert gemms.count == 2 * len(converted(model)) - len(["q", "k", "v"])


def test_compiled_it_is_one_graph_and_trains_as_eagerly() -> None:
    model = with_lora(calibrated(f8.convert_to_float8_training(base(num_hidden_layers=1), config="delayed")))
    eager = copy.deepcopy(model)
    run, counter = compile_counted(model)
    assert train(model, language_loss, steps=3, run=run) == train(eager, language_loss, steps=3)
    assert counter.frame_count == 1


def test_scales_of_a_base_that_no_optimizer_holds_move_on() -> None:
    model = lora_on_converted("delayed")
    train(model, language_loss, steps=3)
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear):
            assert layer.input_scale.amax_history.count_nonzero() == 3


# Converted with its adapters


def test_converted_after_lora_the_adapters_run_in_float8_too() -> None:
    """A rank of 8 is padded to 16."""
    model = f8.convert_to_float8_training(with_lora(base()))
    assert isinstance(model.get_submodule(f"{Q}.base_layer"), f8.Float8Linear)
    assert set(adapters(model)) < set(converted(model))
    assert left_out(model) == {}


def test_auto_filter_leaves_adapters_out_and_says_why() -> None:
    with torch.device("meta"):  # layers that are large enough to gain
        model = with_lora(base(hidden_size=4096, num_hidden_layers=1))
    f8.convert_to_float8_training(model, module_filter_fn=f8.auto_filter("tensorwise"))
    assert {f"{Q}.base_layer", f"{Q}.lora_A.default"} & set(converted(model)) == {f"{Q}.base_layer"}
    assert set(adapters(model)) <= set(left_out(model))
    assert left_out(model)[f"{Q}.lora_A.default"] == "K=4096, N=8: not multiples of 16, so each GEMM would be padded"


def test_a_filter_by_name_leaves_adapters_out() -> None:
    first = f8.convert_to_float8_training(
        with_lora(base()),
        config="delayed",
        module_filter_fn=lambda linear, fqn: "lora_" not in fqn,
    )
    assert sorted(left_out(first)) == sorted(adapters(first))
    assert train(first, language_loss) == train(lora_on_converted("delayed"), language_loss), "as converted before"


# Saved


def saved_adapter(model: Any, path: Path, **options: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(path, **options)
    return safetensors_torch.load_file(path / "adapter_model.safetensors")


@every_recipe
def test_a_saved_adapter_is_a_plain_one_and_loads_onto_a_plain_or_a_converted_base(recipe: str, tmp_path: Path) -> None:
    model = lora_on_converted(recipe)
    train(model, language_loss, steps=3)
    saved = saved_adapter(model, tmp_path)
    assert sorted(saved) == sorted(f"{name.removesuffix('.default')}.weight" for name in adapters(model))

    onto_plain = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    with f8.float8_disabled(model.eval()):
        assert torch.equal(onto_plain(input_ids=IDS).logits, model(input_ids=IDS).logits)
    onto_converted = peft.PeftModel.from_pretrained(f8.convert_to_float8_training(base(), config=recipe), tmp_path)
    f8.convert_from_float8_training(onto_converted)
    assert torch.equal(onto_converted.eval()(input_ids=IDS).logits, onto_plain(input_ids=IDS).logits)


def test_an_adapter_with_delayed_scales_is_saved_without_them(tmp_path: Path) -> None:
    """As it is, peft would take the scales for a part of the adapter, and warn of their shapes."""
    model = f8.convert_to_float8_training(with_lora(base()), config="delayed")
    train(model, language_loss, steps=2)
    saved = saved_adapter(model, tmp_path, state_dict=f8.plain_state_dict(model))
    assert sorted(saved) == sorted(f"{name.removesuffix('.default')}.weight" for name in adapters(model))
    with pytest.warns(peft.utils.warning.PeftWarning, match="invalid shape.*lora_A.fp8_amax_input"):
        saved_adapter(model, tmp_path)


# Merged


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("safe_merge", [False, True], ids=["in place", "safe_merge"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_merged_the_new_weight_is_the_one_that_is_multiplied(recipe: str, safe_merge: bool, cached: bool) -> None:
    """The adapter is as large as the weight, so that the old cast, or the old scale, would show."""
    converted_base = f8.convert_to_float8_training(base(), config=recipe)
    if cached:
        f8.cache_weight_casts(converted_base)
    model = with_lora(converted_base)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    train(model, language_loss, steps=2)
    before = converted_base.model.layers[0].self_attn.q_proj.weight.clone()
    merged = model.merge_and_unload(safe_merge=safe_merge).requires_grad_(True)
    assert type(merged) is type(base())
    assert left_out(merged) == {}
    assert type(merged.model.layers[0].self_attn.q_proj) is f8.Float8Linear
    if recipe == "delayed":
        f8.update_delayed_scaling(merged)  # README: after weights were changed by anything but an optimizer

    plain = f8.convert_from_float8_training(copy.deepcopy(merged))
    fresh = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    fresh.load_state_dict(merged.state_dict())  # what else than its weights a delayed model goes by
    assert not torch.equal(plain.model.layers[0].self_attn.q_proj.weight, before)
    for mode in (True, False):
        assert torch.equal(merged.train(mode)(input_ids=IDS).logits, fresh.train(mode)(input_ids=IDS).logits)
    assert_near(train(merged, language_loss), train(plain, language_loss), within=0.02)
