"""A small causal language model: embedding, RMSNorm, rotary attention, SwiGLU, output head. Bytes in, bytes out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256


class RMSNorm(nn.Module):
    """x / rms(x), times a learned gain."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [B, heads, T, head_dim]: the halves of each head turn by an angle that grows with T."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        batch, tokens, dim = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, self.num_heads, -1).transpose(1, 2)

        q, k = rotate(heads(self.q_proj(x)), cos, sin), rotate(heads(self.k_proj(x)), cos, sin)
        y = F.scaled_dot_product_attention(q, k, heads(self.v_proj(x)), is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)). The product is where large activations are born."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Norm, attention, norm, MLP, each added to the residual stream."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, num_heads)
        self.mlp_norm, self.mlp = RMSNorm(dim), SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ByteModel(nn.Module):
    """Predicts the next byte; returns the mean cross-entropy in nats."""

    def __init__(
        self, dim: int = 256, num_layers: int = 2, num_heads: int = 4, hidden: int = 768, max_tokens: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads, hidden) for _ in range(num_layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, NUM_BYTES, bias=False)
        half = dim // num_heads // 2
        angle = torch.outer(torch.arange(max_tokens), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, T] int64 -> 0-d loss."""
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())
