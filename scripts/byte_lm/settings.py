"""What a call of `scripts/train` was asked to do: complete when built, saved with its results."""

from __future__ import annotations

from dataclasses import dataclass

BASELINE = "bf16"
OPTIMIZERS = {
    "adamw": "AdamW, states in float32",
    "adamw8": "torchao's AdamWFp8, states in float8",
}
PARALLEL = {
    "ddp": "each process has the model and a part of each step's sequences",
    "fsdp2": "the same, with weights, gradients and optimizer states split over them",
    "tp": "each has the same sequences, some of the heads and some of the hidden units",
}


class UsageError(Exception):
    """What the user asked for cannot be done. The message is one line that says what and why."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and a run that fits it. `batch` sequences of `context` bytes make one step."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


# At twice its learning rate `small` learns faster (1.84 instead of 1.88 held out), but runs drift apart by
# chance: recipes ended 0.5 % below to 1.3 % above bf16. At 1e-3 two bf16 runs whose weights differ by 1 % at
# the start end 0.2 % apart, so that what is left to see is the recipe.
SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, context=64, batch=8, steps=200, learning_rate=3e-3),
    "small": Size(width=128, layers=4, heads=4, context=256, batch=4, steps=500, learning_rate=1e-3),
    "base": Size(width=768, layers=12, heads=12, context=1024, batch=32, steps=1000, learning_rate=6e-4),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`recipes` begins with the yardstick. `data` is None for Python's standard library.

    What has a default has it for `--resume`: results from before there was a choice don't name it. `parallel` is None
    for a process of its own; `batch` is that of all processes.
    """

    recipes: tuple[str, ...]
    size: str
    steps: int
    batch: int
    seed: int
    data: str | None
    compile: bool
    optimizer: str = "adamw"
    parallel: str | None = None
    processes: int = 1
    float8_all_gather: bool = False

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def validation_every(self) -> int:
        """Steps between two validations: five in a run, however short."""
        return -(-self.steps // 5)
