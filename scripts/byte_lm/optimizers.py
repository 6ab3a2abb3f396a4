"""What `--optimizer` names: torch's AdamW, and torchao's, which keeps its states in float8, as MS-AMP's O2 does."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from byte_lm.saved_bytes import parts
from byte_lm.settings import UsageError
from float8_compile.variants import quiet

BETAS = (0.9, 0.95)


def adamw8() -> type[Optimizer]:
    """torchao's AdamWFp8. Imported late, since that takes seconds; `torch.load` knows its states from then on.

    Its steps have no bound (torchao 0.18): e4m3 loses the second moment of an element that is 1000 times smaller than
    its block's largest, and keeps the first. `small` bears it; at `tiny`'s learning rate, embeddings were seen to jump.
    """
    try:
        with quiet():
            from torchao.optim import AdamWFp8
    except ImportError:
        raise UsageError("--optimizer adamw8 needs torchao: pip install torchao") from None
    # A hint to torchao's authors; both caches of compiled graphs work.
    warnings.filterwarnings("ignore", "OptimStateFp8 does not implement _stable_hash_for_caching")
    return AdamWFp8


def build_optimizer(name: str, parameters: Iterable[nn.Parameter], *, compile: bool) -> Optimizer:
    parameters = list(parameters)
    # No kernel steps plain tensors and DTensors together.
    kinds = [(is_matrix, is_split) for is_matrix in (True, False) for is_split in (False, True)]
    alike = {kind: [p for p in parameters if (p.dim() >= 2, isinstance(p, DTensor)) == kind] for kind in kinds}
    groups = [
        {"params": some, "weight_decay": 0.1 if is_matrix else 0.0} for (is_matrix, _), some in alike.items() if some
    ]
    if name == "adamw":
        return AdamW(groups, betas=BETAS, fused=True)
    optimizer: Optimizer = adamw8()(groups, betas=BETAS)  # type: ignore[call-arg]
    if not compile:
        # It compiles its step, a graph for each shape of parameter, without being asked.
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def build_twin(name: str, parameters: Iterable[nn.Parameter], *, compile: bool) -> Optimizer:
    """The same for parameters that are alike, with gradients: a step of it compiles and allocates what one will."""
    twins = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    return build_optimizer(name, twins, compile=compile)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # an input of a compiled step: a new number would be a new graph
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def state_bytes(optimizer: Optimizer) -> int:
    """Of all states, as they lie in this process's memory."""
    return sum(part.nbytes for state in optimizer.state.values() for value in state.values() for part in parts(value))
