"""Whether a linear layer would gain from float8 on a GPU: its step against a roofline (Williams et al., 2009).

    GEMM    max(FLOPs / (GEMM_SHARE · peak), bytes / (MEMORY_SHARE · bandwidth))
    cast    bytes / (MEMORY_SHARE · bandwidth)
    each    LAUNCH on top

Per step there are three GEMMs of 2·M·K·N FLOPs in either precision, and in float8 the casts. What a cast moves is what
Inductor's kernels move, in bytes an element of a bfloat16 tensor: an amax reads 2; a cast reads 2 and writes 1 for
each layout that a GEMM wants. The input is made by a norm or an activation, whose kernel takes the amax along, and with
a delayed scale makes the cast too. A gradient and a weight come from memory. A delayed weight's amax is taken after the
optimizer step, for all layers at once; a recomputed weight is read once more, in backward.

An estimate, made to compare: of two layers that read the same tensor each is charged for it, no GEMM is slow for want
of tiles, no kernel is overlapped. `benchmarks/results/preview_llama.json` has the bytes that Inductor's kernels move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from float8_compile.recipe import Cast, Gemm, Recipe
from float8_compile.targets import Target

BF16 = torch.bfloat16  # what float8 is compared with; float32 weights are multiplied so under autocast

# Of a datasheet's peaks what large kernels reach, and a kernel's own time: measured on H100 by torchao's authors
# (torchao 0.18, torchao/testing/training/roofline_utils.py).
GEMM_SHARE, MEMORY_SHARE, LAUNCH = 0.78, 0.92, 2e-6


@dataclass(frozen=True)
class Step:
    """What a layer's forward and backward take, in seconds. launches: how many kernels."""

    gemms: float
    casts: float
    launches: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.gemms + self.casts + self.launches * LAUNCH


def bf16_step(m: int, k: int, n: int, target: Target) -> Step:
    """M tokens through an `nn.Linear` of K inputs and N outputs, in bfloat16."""
    return Step(sum(_gemm(size, BF16, target) for size in _sizes(m, k, n)), 0.0, 3)


def float8_step(m: int, k: int, n: int, target: Target, recipe: Recipe, recompute: bool = True) -> Step:
    """M tokens through a `Float8Linear` with this recipe and this `recompute_weight_cast`."""
    gemms = recipe.output, recipe.grad_input, recipe.grad_weight
    times = [_gemm(size, gemm.left.dtype or BF16, target) for size, gemm in zip(_sizes(m, k, n), gemms, strict=True)]
    moved, launches = cast_traffic(m, k, n, recipe, recompute)
    return Step(sum(times), moved / (MEMORY_SHARE * target.bandwidth), len(gemms) + launches)


def cast_traffic(m: int, k: int, n: int, recipe: Recipe, recompute: bool = True) -> tuple[int, int]:
    """Bytes that the layer's casts move in a step, and in how many kernels."""
    elements = {"input": m * k, "weight": n * k, "grad_output": m * n}
    costs = {role: _cost(role, casts, recompute) for role, casts in _casts(recipe).items()}
    return sum(elements[role] * moved for role, (moved, _) in costs.items()), sum(count for _, count in costs.values())


def _sizes(m: int, k: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, contracted axis and columns of output, grad_input and grad_weight."""
    return (m, k, n), (m, n, k), (n, m, k)


def _gemm(size: tuple[int, int, int], operands: torch.dtype, target: Target) -> float:
    rows, contracted, columns = size
    moved = contracted * (rows + columns) * operands.itemsize + rows * columns * BF16.itemsize
    flops = 2 * rows * contracted * columns
    return max(flops / (GEMM_SHARE * target.peak(operands)), moved / (MEMORY_SHARE * target.bandwidth))


def _casts(recipe: Recipe) -> dict[str, tuple[Cast, Cast]]:
    def pair(first: Gemm, second: Gemm, *sides: str) -> tuple[Cast, Cast]:
        return getattr(first, sides[0]), getattr(second, sides[1])

    return {
        "input": pair(recipe.output, recipe.grad_weight, "left", "right"),
        "weight": pair(recipe.output, recipe.grad_input, "right", "right"),
        "grad_output": pair(recipe.grad_input, recipe.grad_weight, "left", "left"),
    }


def _cost(role: str, casts: tuple[Cast, Cast], recompute: bool) -> tuple[int, int]:
    """Bytes an element, and kernels."""
    first, second = casts
    itemsize = BF16.itemsize
    once = first == second and first.granularity == "tensor"
    moved = launches = 0
    for number, cast in enumerate(casts[:1] if once else casts):
        if cast.dtype is None:
            continue
        produced = role == "input" and number == 0
        layouts = 2 if once else 1
        if cast.is_delayed:
            # A weight's amax: after the step, beside all the others'.
            moved += (0 if produced else itemsize) + layouts + (itemsize if role == "weight" else 0)
            launches += 0 if produced else 1
        else:
            moved += (0 if produced else itemsize) + itemsize + layouts
            launches += 1 if produced else 2
        launches += cast.granularity == "tensor" and role != "weight"  # finishes an amax
    if role == "weight" and once and recompute and first.dtype is not None:
        moved, launches = moved + itemsize, launches + 1  # each layout is then written by a kernel of its own
    return moved, launches
