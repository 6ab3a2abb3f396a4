"""Tests with other people's libraries: nothing is fetched, and torchvision can be imported beside torch's CPU build."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of transformers
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # compile_checks.py


def _kernels_can_be_loaded(torchvision: Path) -> bool:
    try:
        torch.ops.load_library(next(torchvision.glob("_C*.so")))
    except (OSError, StopIteration):
        return False
    return True


def _declare_torchvisions_operators() -> torch.library.Library | None:
    """PyPI's torchvision is built for CUDA's torch. Beside the CPU build its kernels can't be loaded, which it says
    nothing of; but it registers fake kernels for these two operators in any case, and `import torchvision`, and with it
    `import timm`, then fails with "operator torchvision::nms does not exist"."""
    found = importlib.util.find_spec("torchvision")
    if found is None or _kernels_can_be_loaded(Path(*found.submodule_search_locations or [])):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_declared = _declare_torchvisions_operators()  # held: without the object they are gone again
