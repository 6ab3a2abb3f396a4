"""transformers' Trainer, Accelerate and Lightning: each library's own loop, as it documents it, with one line added.

The line is `f8.convert_to_float8_training(model, ...)`, before the loop; nothing is called after a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_checks import REASON, VOCABULARY, assert_near, calibrated, every_recipe, left_out, llama
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset

import float8_compile as f8

accelerate = pytest.importorskip("accelerate", reason=REASON)
lightning = pytest.importorskip("lightning", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
ModelCheckpoint = pytest.importorskip("lightning.pytorch.callbacks").ModelCheckpoint

pytestmark = [
    pytest.mark.usefixtures("afresh"),
    # lightning's own: how it asks torch's pytree, and that it would like other settings
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

BATCHES, EPOCHS = 3, 2
Losses = list[float]


class Sentences(Dataset):
    """Always the same ones, of few words, which are soon learnt."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY // 16, (4 * BATCHES, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


# Each library's loop: trains the model, saves after each epoch, and gives the losses. resumes: goes on from there.


def by_trainer(model: Any, folder: Path, epochs: int = EPOCHS, resumes: bool = False, **options: Any) -> Losses:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resumes)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_accelerate(model: Any, folder: Path, epochs: int = EPOCHS, resumes: bool = False, **options: Any) -> Losses:
    losses: Losses = []
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of another test, in the same process
    accelerator = accelerate.Accelerator(cpu=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Sentences(), batch_size=4))
    if resumes:
        accelerator.load_state(str(folder))
    run.train()
    for _ in range(1 if resumes else 0, epochs):
        for batch in batches:
            with accelerator.accumulate(run):
                loss = run(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.save_state(str(folder))
    return losses


class LanguageModel(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("validation", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Noting(lightning.Callback):
    def __init__(self) -> None:
        self.losses: Losses = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: dict[str, Tensor], *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def by_lightning(
    model: Any, folder: Path, epochs: int = EPOCHS, resumes: bool = False, compiles: bool = False, **options: Any
) -> Losses:
    module, noting = LanguageModel(model), Noting()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[noting, ModelCheckpoint(folder, filename="epoch", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    batches = DataLoader(Sentences(), batch_size=4)
    run = torch.compile(module, backend="aot_eager") if compiles else module
    trainer.fit(run, batches, batches, ckpt_path=str(folder / "epoch.ckpt") if resumes else None)
    return noting.losses


Loop = Callable[..., Losses]
LOOPS: dict[str, Loop] = {"Trainer": by_trainer, "Accelerate": by_accelerate, "Lightning": by_lightning}
BF16: dict[str, dict[str, Any]] = {
    "Trainer": {"bf16": True},
    "Accelerate": {"mixed_precision": "bf16"},
    "Lightning": {"precision": "bf16-mixed"},
}
# options, and the optimizer's steps in all
ACCUMULATED: dict[str, tuple[dict[str, Any], int]] = {
    "Trainer": ({"gradient_accumulation_steps": BATCHES}, EPOCHS),
    "Accelerate": ({"gradient_accumulation_steps": BATCHES}, EPOCHS),
    "Lightning": ({"accumulate_grad_batches": BATCHES}, EPOCHS),
}
COMPILED: dict[str, dict[str, Any]] = {
    "Trainer": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "Accelerate": {"dynamo_backend": "aot_eager"},
    "Lightning": {"compiles": True},
}
every_loop = pytest.mark.parametrize("name", LOOPS)


def updates(model: Any) -> int:
    """Of delayed scales, so far."""
    return int(model.lm_head.input_scale.amax_history.count_nonzero())


@every_recipe
@every_loop
def test_the_loss_falls_as_the_plain_models_does(name: str, recipe: str, tmp_path: Path) -> None:
    model = f8.convert_to_float8_training(llama(), config=recipe)
    losses = LOOPS[name](model, tmp_path / "float8")
    assert_near(losses, LOOPS[name](llama(), tmp_path / "plain"), within=0.01)
    assert len(losses) == BATCHES * EPOCHS
    if recipe == "delayed":
        assert updates(model) == len(losses)


@every_loop
def test_in_bf16_too(name: str, tmp_path: Path) -> None:
    model = f8.convert_to_float8_training(llama(), config="delayed")
    losses = LOOPS[name](model, tmp_path / "float8", **BF16[name])
    assert_near(losses, LOOPS[name](llama(), tmp_path / "plain", **BF16[name]), within=0.01)
    assert updates(model) == len(losses)


@every_loop
def test_delayed_scales_move_on_once_for_several_microbatches(name: str, tmp_path: Path) -> None:
    options, steps = ACCUMULATED[name]
    model = f8.convert_to_float8_training(llama(), config="delayed")
    losses = LOOPS[name](model, tmp_path / "float8", **options)
    assert_near(losses, LOOPS[name](llama(), tmp_path / "plain", **options), within=0.01)
    assert updates(model) == steps


@pytest.mark.parametrize("state", ["tensorwise", "delayed", "delayed, calibrated"])
@every_loop
def test_resumed_it_goes_on_where_it_was(name: str, state: str, tmp_path: Path) -> None:
    """One epoch, and in a new model the second, are two epochs: bitwise, with delayed scales."""

    def built() -> Any:
        recipe, _, after_calibration = state.partition(", ")
        model = f8.convert_to_float8_training(llama(), config=recipe)
        return calibrated(model) if after_calibration else model

    straight, resumed = built(), built()
    losses = LOOPS[name](straight, tmp_path / "straight")
    LOOPS[name](built(), tmp_path / "resumed", epochs=1)
    assert LOOPS[name](resumed, tmp_path / "resumed", resumes=True)[-BATCHES:] == losses[-BATCHES:]
    for ours, theirs in zip(resumed.state_dict().values(), straight.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@every_loop
def test_compiled_by_the_library_it_trains_as_eagerly(name: str, tmp_path: Path) -> None:
    model = calibrated(f8.convert_to_float8_training(llama(num_hidden_layers=1), config="delayed"))
    eager = copy.deepcopy(model)
    counters.clear()
    losses = LOOPS[name](model, tmp_path / "compiled", **COMPILED[name])
    assert counters["stats"]["unique_graphs"] >= 1
    assert losses == LOOPS[name](eager, tmp_path / "eager")


# Accelerate's hooks, which bring a layer's weights when it is called


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_converted_model_may_be_offloaded(recipe: str, tmp_path: Path) -> None:
    model = f8.convert_to_float8_training(llama(), config=recipe)
    by_accelerate(model, tmp_path)
    tokens = Sentences()[0]["input_ids"][None]
    expected = model.eval()(tokens).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert torch.equal(model(tokens).logits, expected)


def test_an_offloaded_model_is_not_converted_and_the_report_says_why() -> None:
    model = accelerate.cpu_offload(llama(), execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="no layer was converted"):
        f8.convert_to_float8_training(model)
    assert set(left_out(model).values()) == {"its forward was replaced on the instance"}
