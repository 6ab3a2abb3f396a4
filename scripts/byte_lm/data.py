"""Real text that every machine has, and which bytes of it are trained on at which step.

Everything here is a function of its arguments: a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from byte_lm.settings import UsageError

HELD_OUT = 0.05
VALIDATION_SEQUENCES = 128
# The same files on every machine, and code rather than tests and tables.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both (n,) uint8; whole files if there are several."""

    name: str
    train: Tensor
    validation: Tensor

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.validation.numpy().tobytes())
        return digest.hexdigest()[:16]


def files_under(folder: Path, suffix: str) -> Iterator[Path]:
    """In an order that does not depend on the file system."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        paths = (Path(where, name) for name in sorted(names) if name.endswith(suffix))
        yield from (path for path in paths if path.is_file())


def place(name: str) -> float:
    """Between 0 and 1, spread evenly over names, and the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def held_out(names: list[str]) -> set[str]:
    """The names whose files are for validation: whether one is does not depend on the others."""
    chosen = {name for name in names if place(name) < HELD_OUT}
    return chosen if 0 < len(chosen) < len(names) else {min(names, key=place)}


def join(contents: Iterable[bytes]) -> Tensor:
    # A zero byte tells the model where a file ends; text has none of its own.
    joined = bytearray(b"\0".join(contents))
    empty = torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else empty


def read_folder(folder: Path, suffix: str) -> dict[str, bytes]:
    """Contents by name, relative to the folder. What holds a zero byte is no text."""
    read = {p.relative_to(folder).as_posix(): p.read_bytes() for p in files_under(folder, suffix)}
    return {name: content for name, content in read.items() if content and b"\0" not in content}


def read(data: str | None) -> dict[str, bytes]:
    if data is None:
        return read_folder(Path(sysconfig.get_path("stdlib")), ".py")
    path = Path(data)
    return read_folder(path, "") if path.is_dir() else {path.name: path.read_bytes()}


def split(contents: dict[str, bytes]) -> tuple[Tensor, Tensor]:
    """The bytes to train on and the bytes held out: other files, or one file's start and end."""
    if len(contents) > 1:
        chosen = held_out(list(contents))
        return (
            join(content for name, content in contents.items() if name not in chosen),
            join(content for name, content in contents.items() if name in chosen),
        )
    content = b"".join(contents.values())
    cut = int(len(content) * (1 - HELD_OUT))
    return join([content[:cut]]), join([content[cut:]])


def load_text(data: str | None, context: int) -> Text:
    name = data or "Python's standard library"
    try:
        train, validation = split(read(data))
    except OSError as error:
        raise UsageError(f"cannot read --data {data}: {error.strerror}") from None
    if min(len(train), len(validation)) <= context:
        raise UsageError(
            f"too little text in {name}: {len(train)} bytes to train on and {len(validation)} held "
            f"out, where each must exceed the context of {context}"
        )
    return Text(name, train, validation)


def windows(text_n: Tensor, starts_B: Tensor, context: int) -> Tensor:
    """(B, T + 1) int64: the model reads the first T bytes of a row and predicts the last T."""
    return text_n[starts_B[:, None] + torch.arange(context + 1)].long()


def training_batch(text: Text, step: int, seed: int, batch: int, context: int) -> Tensor:
    """(B, T + 1) int64, a function of seed and step: no generator's state needs saving."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts_B = torch.randint(len(text.train) - context, (batch,), generator=generator)
    return windows(text.train, starts_B, context)


def validation_batches(text: Text, batch: int, context: int) -> Iterator[Tensor]:
    """(B, T + 1) int64 each, evenly spread over the held-out bytes; all of one shape, so that none
    makes the compiler start again."""
    count = -(-VALIDATION_SEQUENCES // batch)
    starts = torch.linspace(0, len(text.validation) - context - 1, count * batch).long()
    for starts_B in starts.view(count, batch):
        yield windows(text.validation, starts_B, context)
