"""One transformer layer of Llama-3-8B, 8192 tokens, in plain torch: the model of the preview's tables.

x (1, 8192, 4096) -> RMSNorm -> attention: 32 heads, 8 of keys and values, rotary -> + x
                  -> RMSNorm -> feed-forward: SwiGLU, 14336                       -> + x
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, DIM, HIDDEN = 8192, 4096, 14336
HEADS, KEY_HEADS = 32, 8
HEAD = DIM // HEADS


class Attention(nn.Module):
    """Grouped queries: each head of keys and values serves four of queries, and is repeated for them."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(DIM, KEY_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(DIM, KEY_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, HEAD).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., length, HEAD), turned in float32 by angles whose cos and sin are (length, HEAD / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


def build(convert: Callable[[nn.Module], object] = lambda _: None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The layer in bfloat16, after `convert(layer)`, and its inputs; x requires a gradient, as inside a model."""
    layer = Layer().bfloat16()
    convert(layer)
    x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    return layer, (x, torch.randn(TOKENS, HEAD // 2), torch.randn(TOKENS, HEAD // 2))
