"""transformers: a Llama, a BERT and mixtures of experts are converted, trained, compiled, saved and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import compile_counted
from ecosystem_checks import (
    HIDDEN,
    IDS,
    REASON,
    assert_every_linear_is_float8,
    assert_is_put_back,
    assert_near,
    assert_trains_as_plain,
    bert,
    calibrated,
    converted,
    every_recipe,
    language_loss,
    left_out,
    llama,
    mixtral,
    train,
)
from torch import Tensor, nn

import float8_compile as f8
from float8_compile.delayed_step import scales_of

transformers = pytest.importorskip("transformers", reason=REASON)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=REASON)

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]

Build = Callable[..., Any]
MODELS: dict[str, Build] = {"Llama": llama, "BERT": bert, "Mixtral": mixtral}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)

LLAMA_LAYER = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
BERT_LAYER = [
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]
LINEARS = {
    "Llama": [*(f"model.layers.{n}.{name}" for n in range(2) for name in LLAMA_LAYER), "lm_head"],
    "BERT": [
        *(f"bert.encoder.layer.{n}.{name}" for n in range(2) for name in BERT_LAYER),
        "cls.predictions.transform.dense",
        "cls.predictions.decoder",
    ],
    "Mixtral": [*(f"model.layers.{n}.{name}" for n in range(2) for name in LLAMA_LAYER[:4]), "lm_head"],
}


def with_state(build: Build, state: str) -> Any:
    """A converted model that has trained: state says with which recipe, and whether it was calibrated before."""
    recipe, _, after_calibration = state.partition(", ")
    model = f8.convert_to_float8_training(build(), config=recipe)
    if after_calibration:
        calibrated(model)
    train(model, language_loss, steps=2)
    return model.eval()


# Training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recipe
@every_model
def test_its_loss_falls_as_the_plain_models_does(build: Build, recipe: str, dtype: torch.dtype) -> None:
    plain = build().to(dtype)
    model = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    assert_trains_as_plain(model, plain, language_loss, within=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_is_converted_and_multiplies_in_float8(name: str) -> None:
    assert_every_linear_is_float8(f8.convert_to_float8_training(MODELS[name]()), LINEARS[name], language_loss)


def test_mixtrals_experts_and_routers_are_no_linears_and_stay_as_they_are() -> None:
    """transformers 5 holds the experts of a layer in two parameters, which its own grouped GEMMs read."""
    model = f8.convert_to_float8_training(mixtral())
    experts = {name: p for name, p in model.named_parameters() if ".mlp." in name}
    assert {name.removeprefix("model.layers.0."): tuple(p.shape) for name, p in experts.items() if ".0." in name} == {
        "mlp.gate.weight": (4, HIDDEN),
        "mlp.experts.gate_up_proj": (4, 4 * HIDDEN, HIDDEN),
        "mlp.experts.down_proj": (4, HIDDEN, 2 * HIDDEN),
    }
    report = f8.conversion_report(model)
    assert [row.fqn for row in report if ".mlp." in row.fqn] == []
    assert report.share < 0.25


def test_gpt2s_layers_are_no_linears_either() -> None:
    """transformers has a class of its own for them, `Conv1D`, whose weight lies the other way round."""
    sizes = {"vocab_size": 128, "n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "n_positions": 16}
    model = f8.convert_to_float8_training(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    assert converted(model) == ["lm_head"]
    assert left_out(model) == {}


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_gradient_checkpointing_changes_no_number_of_delayed_scaling(kind: str) -> None:
    model = f8.convert_to_float8_training(llama(), config="delayed")
    other, calls = copy.deepcopy(model), []
    expected = train(model, language_loss)

    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
    other.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    assert train(other, language_loss) == expected
    assert len(calls) == 2 * len(expected), "each forward ran twice"
    for ours, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@every_recipe
def test_it_generates_greedily(recipe: str) -> None:
    """With the cache of keys and values: one token at a time, which no recipe sees in training."""
    model = with_state(llama, recipe)
    prompt = expected = IDS[:1, :4]
    with torch.no_grad():
        for _ in range(4):
            expected = torch.cat([expected, model(input_ids=expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} moved in eval"


# Ties


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_llamas_head_stays_tied_to_its_embedding(recipe: str) -> None:
    model = f8.convert_to_float8_training(llama(), config=recipe)
    train(model, language_loss, steps=2)
    assert isinstance(model.lm_head, f8.Float8Linear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    f8.convert_from_float8_training(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_berts_head_stays_tied_to_its_embedding_and_its_bias_to_the_heads(recipe: str) -> None:
    model = f8.convert_to_float8_training(bert(), config=recipe)
    train(model, language_loss, steps=2)
    head = model.cls.predictions
    assert isinstance(head.decoder, f8.Float8Linear)
    assert head.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert head.decoder.bias is head.bias


# Compiled

# model, recipe, whether it was calibrated, how often it may compile
COMPILED = [
    (llama, "tensorwise", False, 1),
    (llama, "rowwise", False, 1),
    (llama, "rowwise_with_gw_hp", False, 1),
    (llama, "delayed", False, 2),
    (bert, "delayed", True, 1),
    (mixtral, "tensorwise", False, 1),
]


@pytest.mark.parametrize(("build", "recipe", "calibrates", "compilations"), COMPILED)
def test_compiled_it_is_one_graph_and_trains_as_eagerly(
    build: Build, recipe: str, calibrates: bool, compilations: int
) -> None:
    """`fullgraph=True`, bitwise under aot_eager. One layer of the model, since the second compiles like the first."""
    model = f8.convert_to_float8_training(build(num_hidden_layers=1), config=recipe)
    if calibrates:
        calibrated(model)
    eager = copy.deepcopy(model)
    run, counter = compile_counted(model)
    assert train(model, language_loss, steps=4, run=run) == train(eager, language_loss, steps=4)
    assert counter.frame_count == compilations


def test_under_inductor_it_trains_as_eagerly() -> None:
    model = f8.convert_to_float8_training(llama(num_hidden_layers=1), config="tensorwise")
    eager = copy.deepcopy(model)
    losses = train(model, language_loss, steps=4, run=torch.compile(model, fullgraph=True))
    assert losses == pytest.approx(train(eager, language_loss, steps=4), rel=0.005)


# Saved, and put back

STATES = ["tensorwise", "delayed", "delayed, calibrated"]
every_state = pytest.mark.parametrize("state", STATES)


@every_state
@every_model
def test_put_back_it_is_the_librarys_model_again(build: Build, state: str) -> None:
    plain = build()
    model = with_state(build, state)
    parameters = dict(model.named_parameters())
    with f8.float8_disabled(model):
        expected = model(input_ids=IDS).logits
    f8.convert_from_float8_training(model)
    assert_is_put_back(model, parameters, plain)
    assert torch.equal(plain.eval()(input_ids=IDS).logits, expected)


@every_state
@every_model
def test_saved_without_delayed_scales_it_is_a_plain_models_folder(build: Build, state: str, tmp_path: Path) -> None:
    model = with_state(build, state)
    model.save_pretrained(tmp_path / "ours", state_dict=f8.plain_state_dict(model))
    build().save_pretrained(tmp_path / "plain")
    ours, plain = (safetensors_torch.load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
    assert ours.keys() == plain.keys()

    loaded, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    with f8.float8_disabled(model):
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, model(input_ids=IDS).logits)


@every_state
def test_saved_as_it_is_the_folder_has_its_scales_and_loads_into_a_plain_model(state: str, tmp_path: Path) -> None:
    """transformers reports keys that it has no place for, and goes on."""
    model = with_state(llama, state)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert report.pop("unexpected_keys") == {name for name in model.state_dict() if ".fp8_" in name}
    assert not any(report.values())
    with f8.float8_disabled(model):
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_what_was_saved_as_it_is_goes_on_where_it_was(tmp_path: Path) -> None:
    """from_pretrained, convert, and the scales from the same file."""
    model = with_state(llama, "delayed, calibrated")
    model.save_pretrained(tmp_path)
    other = f8.convert_to_float8_training(type(model).from_pretrained(tmp_path), config="delayed")
    missing, unexpected = other.load_state_dict(
        safetensors_torch.load_file(tmp_path / "model.safetensors"), strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], []), "tied, and saved once"
    assert train(other, language_loss, steps=3) == train(model, language_loss, steps=3)


def test_a_head_of_another_size_is_new_and_the_report_says_so() -> None:
    model = f8.convert_to_float8_training(llama(tie_word_embeddings=False))
    model.resize_token_embeddings(144)
    assert left_out(model) == {"lm_head": "never converted"}
    f8.convert_to_float8_training(model)
    assert left_out(model) == {}


# A mixture of experts that are linears, as transformers 4 and many models of their own have it


class Experts(nn.Module):
    """Each token goes to one expert, which the batch names. calls_idle: whether an expert without tokens is called."""

    def __init__(self, calls_idle: bool) -> None:
        super().__init__()
        self.calls_idle = calls_idle
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN)) for _ in range(3)
        )

    def forward(self, x: Tensor, expert_of_token: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = torch.where(expert_of_token == number)[0]
            if self.calls_idle or len(chosen):
                y = y.index_add(0, chosen, expert(x[chosen]))
        return x + y


@pytest.mark.parametrize("calls_idle", [True, False])
@every_recipe
def test_an_expert_without_tokens_waits_and_later_trains_as_the_plain_one(recipe: str, calls_idle: bool) -> None:
    """The last expert gets its first token in the fourth step."""
    torch.manual_seed(0)
    plain = Experts(calls_idle)
    model = f8.convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    x, target = torch.randn(2, 48, HIDDEN).unbind()

    def losses(model: nn.Module) -> list[float]:
        experts_in_use = iter([2, 2, 2, 3, 3, 3])
        seen = []

        def loss_of(run: Any) -> Tensor:
            seen.append(next(experts_in_use))
            return (run(x, torch.arange(48) % seen[-1]) - target).square().mean()

        return train(model, loss_of, steps=6)

    assert_near(losses(model), losses(plain), within=0.01)
    for layer in model.experts.modules():
        assert all(entry.calibrated and entry.scale > 0 for entry in scales_of(layer).values())


def test_an_expert_without_tokens_has_no_history() -> None:
    torch.manual_seed(0)
    model = f8.convert_to_float8_training(Experts(calls_idle=True), config="delayed")
    train(model, lambda run: run(torch.randn(8, HIDDEN), torch.arange(8) % 2).square().mean(), steps=3)
    used, idle = (model.experts[number][0].input_scale.amax_history for number in (1, 2))
    assert (int(used.count_nonzero()), int(idle.count_nonzero())) == (3, 0)
