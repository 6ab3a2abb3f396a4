"""torch's own attention modules, which multiply by weights without calling the layers that have them.

`nn.MultiheadAttention` multiplies by its packed projection and by `out_proj.weight`: these are reported, and stay as
they are. `nn.TransformerEncoderLayer` has a kernel of its own for inference ("fast path": `eval()`, no gradients,
batch_first), which is handed `linear1.weight` and `linear2.weight`: it would pass by Float8Linears without a word. And
`nn.TransformerEncoder` hands its layers nested tensors in place of a padding mask, which only that kernel takes (and
gives zeros for what is padding).

Each of these two reads an attribute of its own first, which decides nothing else: that is switched off on the objects
that hold Float8Linears, and back when they hold none. It goes along with copies and pickles, and no setting of the
process is touched. But a layer that is converted by itself, `convert_to_float8_training(layer.linear1)`, doesn't know
who holds it: convert what holds the whole `nn.TransformerEncoder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from float8_compile.linear import Float8Linear

# Both are set in __init__ and read in forward (torch/nn/modules/transformer.py, as of torch 2.13).
_SWITCHES: tuple[tuple[type[nn.Module], str, Any], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),  # 1 relu, 2 gelu, 0: another, which the kernel has not
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
_BEFORE = "float8_fast_path"  # attribute of an object whose switch is off: what it was
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

OWN_PRODUCT = "nn.MultiheadAttention multiplies by it without a linear layer: in high precision"
READS_WEIGHT = "nn.MultiheadAttention reads its weight and never calls it"


def settle_fast_paths(module: nn.Module) -> None:
    """After a conversion, either way: torch's own kernel is for layers without a Float8Linear, and only for them."""
    for holder in module.modules():
        for kind, name, off in _SWITCHES:
            if not isinstance(holder, kind) or not hasattr(holder, name):
                continue
            if any(isinstance(child, Float8Linear) for child in holder.modules()):
                vars(holder).setdefault(_BEFORE, getattr(holder, name))
                setattr(holder, name, off)
            elif _BEFORE in vars(holder):
                setattr(holder, name, vars(holder).pop(_BEFORE))


def packed_projections(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What an `nn.MultiheadAttention` multiplies by that is no layer: (3 · embed_dim, embed_dim), or q, k and v."""
    if isinstance(module, nn.MultiheadAttention):
        for name in _PROJECTIONS:
            if (weight := getattr(module, name, None)) is not None:
                yield name, weight


def read_without_a_call(module: nn.Module) -> set[nn.Module]:
    """Linear layers in the place of an `nn.MultiheadAttention`'s `out_proj`, which is never called.

    Of any class: torch's own says so itself (filters.py), but people put others there.
    """
    holders = (holder for holder in module.modules() if isinstance(holder, nn.MultiheadAttention))
    return {holder.out_proj for holder in holders if isinstance(holder.out_proj, nn.Module)}
