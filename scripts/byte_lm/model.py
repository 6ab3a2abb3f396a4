"""A byte-level decoder: RMSNorm, rotary positions, SwiGLU, causal attention, tied head.

Shapes: B sequences of T bytes, D the model's width, H heads of width E = D / H, F the MLP's width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


def rotary_table(context: int, head_width: int) -> Tensor:
    """(2, T, E/2) float32: cosines and sines of position times frequency, in radians."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(context), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x_BHTE: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.to(x_BHTE.dtype)
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """(B, T, D) -> (B, T, D). One GEMM makes q, k and v, so their common input is cast once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTE = functional.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD


class SwiGLU(nn.Module):
    """(B, T, D) -> (B, T, D). One GEMM makes gate and up, as in `Attention`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        y_BTD: Tensor = self.down(functional.silu(gate_BTF) * up_BTF)
        return y_BTD


class Block(nn.Module):
    """(B, T, D) -> (B, T, D), the residual stream in and out."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x_BTD: Tensor, table: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table)
        y_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return y_BTD


class ByteLM(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, 256) float32.

    The head is the embedding's matrix, used through `functional.linear`: it has no `nn.Linear` of its own,
    so conversion leaves it in high precision, as is customary for heads.
    """

    rotary: Tensor

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        # 8/3 of the width makes SwiGLU's three matrices as large as a plain MLP's two; float8 GEMMs
        # on a GPU want multiples of 16.
        hidden = 16 * round(width * 8 / 3 / 16)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("rotary", rotary_table(context, width // heads), persistent=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts smaller, or it grows with depth.
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if into_stream else 1))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        table = self.rotary[:, : tokens_BT.shape[1]]
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, table)
        return functional.linear(self.norm(x_BTD), self.embedding.weight).float()
