"""The one hook that says "the optimizer has stepped".

What depends on the weights' values is renewed here: delayed scales, then cached weights. torch calls the hook at the
end of every optimizer's `step`, made before or after conversion, fused or compiled; not where GradScaler skips the
step, and not for an optimizer that is no `torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8_compile.torch_internals import is_called_by_another

Listener = Callable[[set[int], Tensor | None], None]

_listeners: dict[Listener, int] = {}
_stepped_inside: set[int] = set()


def listen(listener: Listener, turn: int = 0) -> None:
    """Call `listener(ids of the optimizer's parameters, skipped)` after every step, without grad, lower turns first.

    skipped: None, or a tensor that is > 0 where a fused optimizer did nothing, since a GradScaler found an
    overflow: it doesn't leave out the call of such an optimizer, but tells it.

    The hook belongs to the process, so it is registered when somebody listens, not on import.
    """
    if not _listeners:
        # A compiled `step` breaks its graph at torch's own `_init_group` already: there is no graph to spoil.
        register_optimizer_step_post_hook(torch.compiler.disable(_tell))
    _listeners[listener] = turn


@torch.no_grad()
def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if is_called_by_another(optimizer):
        # The ranks' own optimizers of a ZeroRedundancyOptimizer hold different parameters: wait for what all ranks see.
        _stepped_inside.update(stepped)
        return
    stepped |= _stepped_inside
    _stepped_inside.clear()
    for listener in sorted(_listeners, key=_listeners.__getitem__):
        listener(stepped, getattr(optimizer, "found_inf", None))
