"""What one recipe's training has come to: checkpoints and results are made from it."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Losses are in nats per byte, times in seconds.

    `validation` holds (steps done, loss) pairs. `saved_bytes` and `optimizer_bytes` are None until the model has run
    once, `compile_seconds` also where nothing is compiled; a resumed run keeps the first ones.
    """

    recipe: str
    steps: int
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    compile_seconds: float | None = None
    saved_bytes: int | None = None
    optimizer_bytes: int | None = None

    @property
    def done(self) -> int:
        return len(self.losses)

    @property
    def complete(self) -> bool:
        return self.done >= self.steps

    @property
    def training_loss(self) -> float | None:
        """The mean of the last tenth: a single batch's loss says more about the batch."""
        last = self.losses[-max(1, self.steps // 10) :]
        return statistics.fmean(last) if last else None

    @property
    def validation_loss(self) -> float | None:
        return self.validation[-1][1] if self.validation else None

    def tokens_per_second(self, tokens: int) -> float | None:
        """From the median step, which a busy moment of the machine does not move."""
        return tokens / statistics.median(self.step_seconds) if self.step_seconds else None

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Progress:
        return cls(**{**plain, "validation": [(step, loss) for step, loss in plain["validation"]]})
