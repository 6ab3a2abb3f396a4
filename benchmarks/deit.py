"""A vision transformer with DeiT's shapes, in plain torch: the models of the memory benchmark.

patches (batch, 196, 768) -> Linear, class token, positions  (batch, 197, width)
                          -> blocks: LayerNorm, attention, + x, LayerNorm, MLP with GELU, + x
                          -> LayerNorm, Linear of the class token                                -> (batch, 1000)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """A model's numbers. pixels: of a patch, three colours; patches: of an image; one token more is the class's."""

    blocks: int
    width: int
    mlp: int
    heads: int
    patches: int = 196
    pixels: int = 768
    classes: int = 1000

    @property
    def tokens(self) -> int:
        """Of one image."""
        return self.patches + 1


SHAPES = {
    "deit-base": Shape(blocks=12, width=768, mlp=3072, heads=12),
    "deit-570m": Shape(blocks=24, width=1408, mlp=5632, heads=16),
    "tiny": Shape(blocks=3, width=64, mlp=256, heads=2, patches=31, pixels=48, classes=16),
}


class Attention(nn.Module):
    """Every token looks at every other one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.mlp), nn.Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width, eps=1e-6), nn.LayerNorm(shape.width, eps=1e-6)
        self.attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Deit(nn.Module):
    """The whole model; `run` calls a block, so that all of them can share one compiled function."""

    def __init__(self, shape: Shape, run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.run = run
        self.embed = nn.Linear(shape.pixels, shape.width)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x[:, 0]))
