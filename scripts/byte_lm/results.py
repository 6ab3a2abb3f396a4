"""The numbers of a run, and what a later reader needs to judge them, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from byte_lm.data import Text
from byte_lm.progress import Progress
from byte_lm.settings import Settings
from float8_compile.machine import commit, processor, versions

ROOT = Path(__file__).resolve().parents[2]
FILE = "results.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Losses in nats per byte; None is what is not known yet. `to_baseline_percent`: how much
    higher the validation loss is than the yardstick's at the same step."""

    recipe: str
    steps_done: int
    training_loss: float | None
    validation_loss: float | None
    to_baseline_percent: float | None
    tokens_per_second: float | None
    speed_to_baseline: float | None
    saved_bytes: int | None
    optimizer_bytes: int | None
    compile_seconds: float | None

    @property
    def saved_megabytes(self) -> float | None:
        return self.saved_bytes / 1e6 if self.saved_bytes is not None else None


def tokens_per_step(settings: Settings) -> int:
    return settings.batch * settings.shape.context


def percent_above(loss: float | None, baseline: float | None) -> float | None:
    return 100 * (loss / baseline - 1) if loss is not None and baseline is not None else None


def row(progress: Progress, baseline: Progress, tokens: int) -> Row:
    speed, yardstick = progress.tokens_per_second(tokens), baseline.tokens_per_second(tokens)
    last_step = progress.validation[-1][0] if progress.validation else 0
    return Row(
        recipe=progress.recipe,
        steps_done=progress.done,
        training_loss=progress.training_loss,
        validation_loss=progress.validation_loss,
        to_baseline_percent=percent_above(progress.validation_loss, dict(baseline.validation).get(last_step)),
        tokens_per_second=speed,
        speed_to_baseline=speed / yardstick if speed and yardstick else None,
        saved_bytes=progress.saved_bytes,
        optimizer_bytes=progress.optimizer_bytes,
        compile_seconds=progress.compile_seconds,
    )


def rows(progresses: Sequence[Progress], settings: Settings) -> list[Row]:
    """One per recipe; the first recipe is the yardstick."""
    return [row(p, progresses[0], tokens_per_step(settings)) for p in progresses]


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def write(path: Path, settings: Settings, text: Text, progresses: Sequence[Progress]) -> None:
    """Atomic, since `--resume` reads the settings from it."""
    details = {p.recipe: asdict(p) for p in progresses}
    content = {
        "settings": asdict(settings),
        "shape": asdict(settings.shape),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(ROOT),
        "text": {
            "name": text.name,
            "fingerprint": text.fingerprint,
            "training_bytes": len(text.train),
            "validation_bytes": len(text.validation),
        },
        "recipes": [{**asdict(r), **details[r.recipe]} for r in rows(progresses, settings)],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
