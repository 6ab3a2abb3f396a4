"""Checkpoints for those who know nothing of delayed scales: a plain model, another package.

Nobody else needs it (layer_scales.py): into a converted model a checkpoint loads strictly whatever recipe it is from, a
plain one too. But an `nn.Linear` is strict about keys that it does not have.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from float8_compile.layer_scales import STATE_KEYS


def plain_state_dict(source: nn.Module | dict[str, Any]) -> dict[str, Any]:
    """The model's state dict, or this one, without delayed scales: as it would be if the layers were plain.

    Keys go whose last part is a name of theirs (`fp8_scale_weight` and so on). Others stay, such as a parameter that
    somebody called `fp8_gate`. The tensors are the same ones; what is passed is left as it is.
    """
    plain = copy.copy(source.state_dict() if isinstance(source, nn.Module) else source)
    for key in [key for key in plain if key.rpartition(".")[2] in STATE_KEYS]:
        del plain[key]
    return plain
