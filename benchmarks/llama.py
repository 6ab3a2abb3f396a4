"""One transformer layer of Llama's kind, in plain torch: Llama-3-8B's, the model of the preview's tables, or a smaller.

x (1, 8192, 4096) -> RMSNorm -> attention: 32 heads, 8 of keys and values, rotary -> + x
                  -> RMSNorm -> feed-forward: SwiGLU, 14336                       -> + x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """A layer's numbers."""

    tokens: int
    dim: int
    hidden: int
    heads: int
    key_heads: int

    @property
    def head(self) -> int:
        """The width of one."""
        return self.dim // self.heads


LLAMA_3_8B = Shape(tokens=8192, dim=4096, hidden=14336, heads=32, key_heads=8)
TOKENS = LLAMA_3_8B.tokens


class Attention(nn.Module):
    """Grouped queries: each head of keys and values serves several of queries, and is repeated for them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, self.group = shape.head, shape.heads // shape.key_heads
        self.wq = nn.Linear(shape.dim, shape.heads * shape.head, bias=False)
        self.wk = nn.Linear(shape.dim, shape.key_heads * shape.head, bias=False)
        self.wv = nn.Linear(shape.dim, shape.key_heads * shape.head, bias=False)
        self.wo = nn.Linear(shape.heads * shape.head, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., length, head), turned in float32 by angles whose cos and sin are (length, head / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5), nn.RMSNorm(shape.dim, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


def build(
    convert: Callable[[nn.Module], object] = lambda _: None, shape: Shape = LLAMA_3_8B
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The layer in bfloat16, after `convert(layer)`, and its inputs; x requires a gradient, as inside a model."""
    layer = Layer(shape).bfloat16()
    convert(layer)
    x = torch.randn(1, shape.tokens, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    return layer, (x, *(torch.randn(shape.tokens, shape.head // 2) for _ in range(2)))
