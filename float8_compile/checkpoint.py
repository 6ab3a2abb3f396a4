"""A state dict in two parts: what a plain model has, for those who know nothing of delayed scales, and the scales.

Nobody else needs it (layer_scales.py): into a converted model a checkpoint loads strictly whatever recipe it is from, a
plain one too. But an `nn.Linear` is strict about keys that it does not have.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from float8_compile.layer_scales import STATE_KEYS


def plain_state_dict(source: nn.Module | dict[str, Any]) -> dict[str, Any]:
    """The model's state dict, or this one, without delayed scales: as it would be if the layers were plain.

    Keys go whose last part is a name of theirs (`fp8_scale_weight` and so on). Others stay, such as a parameter that
    somebody called `fp8_gate`. The tensors are the same ones; what is passed is left as it is.
    """
    plain = copy.copy(_state_dict(source))
    for key in list(filter(_is_of_scales, plain)):
        del plain[key]
    return plain


def float8_state_dict(source: nn.Module | dict[str, Any]) -> dict[str, Tensor]:
    """The rest of the model's state dict, or of this one: delayed scales only; {} where no recipe delays any.

    Both parts together, `{**plain_state_dict(model), **float8_state_dict(model)}`, are `state_dict()`. This one alone
    loads with `load_state_dict(..., strict=False)` into a model that has its weights already, and leaves those as they
    are; a weight's scale is then the weight's own.
    """
    return {key: tensor for key, tensor in _state_dict(source).items() if _is_of_scales(key)}


def _state_dict(source: nn.Module | dict[str, Any]) -> dict[str, Any]:
    return source.state_dict() if isinstance(source, nn.Module) else source


def _is_of_scales(key: str) -> bool:
    return key.rpartition(".")[2] in STATE_KEYS
