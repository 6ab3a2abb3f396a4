"""One recipe's training: a model, an optimizer and what they have come to, step by step."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import float8_compile as f8
from byte_lm.data import Text, training_batch, validation_batches
from byte_lm.interrupt import Interrupt
from byte_lm.model import ByteLM
from byte_lm.optimizers import build_optimizer, build_twin, set_learning_rate, state_bytes
from byte_lm.parallel import ALONE, Team, clip_gradients, split_like, whole
from byte_lm.progress import Progress
from byte_lm.saved_bytes import count_saved_bytes
from byte_lm.settings import BASELINE, Settings
from float8_compile.variants import TORCHAO, variant


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def recipe_named(name: str) -> f8.Recipe:
    recipe = f8.Recipe.from_name(name)
    if device().type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        # The first GPUs with float8 GEMMs are 8.9; older ones can show the numerics, not the speed.
        recipe = dataclasses.replace(recipe, emulate=True)
    return recipe


def build_model(settings: Settings, recipe: str, team: Team) -> tuple[ByteLM, nn.Module]:
    """The model, and what is called to run it. The same seed gives the same weights, whatever ran before.

    recipe: bf16, one of ours, or torchao's, which `scripts/train` doesn't offer, but benchmarks/train_curves.py does.
    """
    torch.manual_seed(settings.seed)
    shape = settings.shape
    model = ByteLM(shape.width, shape.layers, shape.heads, shape.context).to(device())
    if recipe.startswith(TORCHAO):
        variant(lambda: (model, ()), recipe)()
    elif recipe != BASELINE:
        gathered = dataclasses.replace(recipe_named(recipe), fsdp_float8_all_gather=settings.float8_all_gather)
        f8.convert_to_float8_training(model, config=gathered)
    called = team.share(model)
    if settings.compile:
        # Block by block: all blocks share one compilation.
        for block in model.blocks:
            block.compile(fullgraph=True)
    return model, called


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def start_compiler() -> None:
    """Loads Inductor with a graph of one node, or the first recipe would pay for what all share."""
    torch.compile(torch.sin)(torch.ones(16, device=device()))


class Trainer:
    """One recipe's model in training. Every batch is a function of the settings and the step."""

    def __init__(self, settings: Settings, recipe: str, text: Text, team: Team = ALONE) -> None:
        self.settings, self.text, self.team = settings, text, team
        self.progress = Progress(recipe, settings.steps)
        self.model, self.called = build_model(settings, recipe, team)
        self.optimizer = build_optimizer(settings.optimizer, self.model.parameters(), compile=settings.compile)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, float32. rows: (B, T + 1) int64."""
        rows = rows.to(device(), non_blocking=True)
        # Float32 weights with bfloat16 activations: AdamW's small updates would be lost in bfloat16
        # weights. bf16 and every float8 recipe get the same activations, and on a CPU with bfloat16
        # instructions this is a third faster than float32.
        with torch.autocast(device().type, torch.bfloat16):
            logits = self.called(rows[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def batch(self) -> Tensor:
        at = self.settings
        rows = training_batch(self.text, self.progress.done, at.seed, at.batch, at.shape.context)
        return self.team.own_rows(rows)

    def first_pass(self) -> None:
        """Compiles forward, backward, evaluation and the optimizer's step, and changes nothing: a twin steps.

        The second of two passes, which compiles nothing, tells how much of the first was compiling.
        """
        rows = self.batch()
        if self.progress.recipe == "delayed" and not self.progress.done:
            # Or the first step would run on dynamic scales, and the second compile another graph.
            with f8.calibrate(self.model):
                self.loss(rows).backward()
            self.optimizer.zero_grad()
        twin = build_twin(self.settings.optimizer, self.model.parameters(), compile=self.settings.compile)
        first, second = (self._seconds_of_a_pass(rows, twin) for _ in range(2))
        if self.progress.saved_bytes is None:
            self.progress.optimizer_bytes = state_bytes(twin)
            _, self.progress.saved_bytes = count_saved_bytes(self.model, lambda: self.loss(rows))
            self.progress.compile_seconds = first - second if self.settings.compile else None

    def _seconds_of_a_pass(self, rows: Tensor, twin: torch.optim.Optimizer) -> float:
        start = time.perf_counter()
        self.loss(rows).backward()
        self.optimizer.zero_grad()
        twin.step()
        with torch.no_grad():
            self.loss(rows).item()
        return time.perf_counter() - start

    def step(self) -> None:
        start, done = time.perf_counter(), self.progress.done
        rate = learning_rate(done, self.settings.steps, self.settings.shape.learning_rate)
        set_learning_rate(self.optimizer, rate)
        loss = self.loss(self.batch())
        loss.backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.losses.append(self.team.mean(loss))
        self.progress.step_seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def validate(self) -> None:
        batches = validation_batches(self.text, self.settings.batch, self.settings.shape.context)
        loss = statistics.fmean(self.team.mean(self.loss(self.team.own_rows(rows))) for rows in batches)
        self.progress.validation.append((self.progress.done, loss))

    def save(self, path: Path) -> None:
        """Atomic: an interrupted save leaves the last one. A completed run needs no optimizer. Collective."""
        unfinished = not self.progress.complete
        state = {
            "progress": self.progress.as_plain(),
            "model": whole(self.model.state_dict()),
            "optimizer": whole(self.optimizer.state_dict()) if unfinished else None,
        }
        if not self.team.leads:
            return
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def load(self, path: Path) -> None:
        """What the first process reads, all have. Collective."""
        # The optimizer's numbers on the host (adamw8's step and learning rate) must not move to a GPU.
        saved = torch.load(path, weights_only=True, map_location="cpu") if self.team.leads else None
        state: Any = self.team.told(saved)
        self.progress = Progress.from_plain(state["progress"])
        own, held = self.model.state_dict(), state["optimizer"]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.model.load_state_dict({name: split_like(tensor, own[name]) for name, tensor in state["model"].items()})
        held["state"] = {number: split_like(of, parameters[number]) for number, of in held["state"].items()}
        self.optimizer.load_state_dict(held)


def load_progress(path: Path) -> Progress:
    """What the checkpoint at `path` says of itself."""
    return Progress.from_plain(torch.load(path, weights_only=True, mmap=True, map_location="cpu")["progress"])


def train(trainer: Trainer, checkpoint: Path, report: Callable[[Progress], None], interrupt: Interrupt) -> None:
    """Trains to the end, from wherever `trainer` is. Ctrl-C leaves a checkpoint behind."""
    progress, every = trainer.progress, trainer.settings.validation_every
    report(progress)
    trainer.first_pass()
    interrupt.at_once = False
    try:
        while not progress.complete:
            trainer.step()
            if progress.done % every == 0 or progress.complete:
                trainer.validate()
                trainer.save(checkpoint)
            report(progress)
            if trainer.team.any(interrupt.heard):
                trainer.save(checkpoint)
                raise KeyboardInterrupt
    finally:
        interrupt.at_once = True
