"""Launches that a preview predicts, kernels that a profiler has seen, and which is which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TRITON, GEMM, ATTENTION, OTHER = ROLES = ("Triton", "GEMM", "attention", "other")

# What the libraries call their kernels; on a CPU the ops themselves. The first that fits.
NAMES = (
    (TRITON, re.compile(r"^triton_")),
    (ATTENTION, re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    (OTHER, re.compile(r"splitK.*reduce", re.IGNORECASE)),
    (GEMM, re.compile(r"gemm|nvjet|cutlass|xmma|cublas|^aten::(mm|addmm|bmm|_scaled_mm)$", re.IGNORECASE)),
)


@dataclass(frozen=True)
class Predicted:
    """A launch in a preview. seconds: the bound."""

    name: str
    role: str
    nbytes: int
    sectors: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A kernel that ran."""

    name: str
    role: str
    seconds: float


def role_of(name: str) -> str:
    """What a kernel is for, as far as its name says it."""
    return next((role for role, names in NAMES if names.search(name)), OTHER)


def pairs(preview: Sequence[Predicted], ran: Sequence[Measured]) -> list[tuple[Predicted, Measured]]:
    """Each launch of a preview with the kernel that it became: Triton's by name, in order where a name occurs several
    times, and the libraries' in order, where there are as many."""
    found: list[tuple[Predicted, Measured]] = []
    names = dict.fromkeys(one.name for one in preview if one.role == TRITON)
    groups = [(lambda one, name=name: one.name == name) for name in names]
    groups += [(lambda one, role=role: one.role == role) for role in (GEMM, ATTENTION)]
    for of_group in groups:
        left, right = [one for one in preview if of_group(one)], [one for one in ran if of_group(one)]
        if len(left) == len(right):
            found += zip(left, right, strict=True)
    return found


def figures(preview: Sequence[Predicted], ran: Sequence[Measured]) -> dict[str, Any]:
    """For JSON: by role what the preview says and what was measured, and all pairs."""
    both = pairs(preview, ran)
    counts = [Counter(one.role for one in of) for of in (preview, ran)]
    roles = {
        role: {
            "predicted": counts[0][role],
            "ran": counts[1][role],
            "bytes in sectors": sum(one.sectors for one in preview if one.role == role),
            "at least seconds": sum(one.seconds for one in preview if one.role == role),
            "measured seconds": sum(one.seconds for one in ran if one.role == role),
        }
        for role in ROLES
    }
    same = sum(one.role == TRITON for one, _ in both)
    return {
        "roles": roles,
        "same names": same,
        "pairs": [asdict(one) | {"kernel": other.name, "measured": other.seconds} for one, other in both],
        "predicted": [asdict(one) for one in preview],
        "ran": [asdict(one) for one in ran],
    }
