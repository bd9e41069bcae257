"""Functions from a few points: a set of (x, y) without an order is read by latents through cross-attention, the latents attend to each
other, and queries read them; the loss is a Gaussian's likelihood with a learnt spread. Two micro-batches, delayed scaling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

WAVES, POINTS, QUERIES = 8, 40, 24
"""Frequencies by which a place is told, points that are read, and places that are asked for."""


class Attention(nn.Module):
    """x [B, T, dim] reads y [B, S, dim] -> [B, T, dim]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_v, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            f(z).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, z in ((self.to_q, x), (self.to_k, y), (self.to_v, y))
        )
        out: Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Reader(nn.Module):
    """Norm, attention to something or to itself, norm, MLP, each added."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.norm1(x)
        x = x + self.attn(z, z if y is None else y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


def waves(x: Tensor) -> Tensor:
    """Sines and cosines of a place: [..., 1] -> [..., 16]."""
    angle = x * math.pi * 2.0 ** torch.linspace(-1, 2, WAVES)
    return torch.cat((angle.sin(), angle.cos()), -1)


class Perceiver(nn.Module):
    """Points [B, N, 2] and places [B, Q, 1] -> mean and log-spread [B, Q, 2]."""

    def __init__(self, dim: int, num_latents: int, layers: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.1 * torch.randn(num_latents, dim))
        self.point, self.value, self.place = nn.Linear(2 * WAVES, dim), nn.Linear(1, dim), nn.Linear(2 * WAVES, dim)
        self.read = Reader(dim, 4)
        self.blocks = nn.ModuleList(Reader(dim, 4) for _ in range(layers))
        self.ask = Reader(dim, 4)
        self.norm = nn.LayerNorm(dim)
        self.answer = nn.Linear(dim, 2)

    def forward(self, points: Tensor, places: Tensor) -> Tensor:
        seen = self.point(waves(points[..., :1])) + self.value(points[..., 1:])
        x = self.read(self.latents.expand(len(points), -1, -1), seen)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.answer(self.norm(self.ask(self.place(waves(places)), x)))
        return out


ROLES = {
    "blocks": r"read|blocks\.\d+|ask",
    "attention": r"(read|blocks\.\d+|ask)\.attn",
    "attention.q": r".*\.attn\.to_q",
    "attention.k": r".*\.attn\.to_k",
    "attention.v": r".*\.attn\.to_v",
    "attention.out": r".*\.attn\.to_out",
    "mlp.up": r"(read|blocks\.\d+|ask)\.up",
    "mlp.down": r"(read|blocks\.\d+|ask)\.down",
    "norm": r".*norm\d?",
    "embedding": r"point",
    "head": r"answer",
}


def functions(seed: int, number: int, rows: int) -> dict[str, Tensor]:
    """Sums of three sines over −1…1, some points of each with a little noise, and what they are at other places."""
    random = generator(seed, number)
    x = 2 * torch.rand(rows, POINTS + QUERIES, 1, generator=random) - 1
    size, shift = (torch.rand(rows, 1, 3, generator=random) for _ in range(2))
    pace = torch.tensor([1.0, 2.0, 3.5])
    y = ((0.4 + size) / pace * (math.pi * (pace * x + 2 * shift)).sin()).sum(-1, keepdim=True)
    y[:, :POINTS] += 0.05 * torch.randn(rows, POINTS, 1, generator=random)
    points = torch.cat((x, y), -1)[:, :POINTS]
    return {"points": points, "places": x[:, POINTS:], "values": y[:, POINTS:, 0]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a Gaussian, as far as its spread matters; no spread below 0.1."""
    mean, spread = model(batch["points"], batch["places"]).float().unbind(-1)
    spread = 0.1 + 0.9 * F.softplus(spread)
    return (spread.log() + 0.5 * ((batch["values"] - mean) / spread).square()).mean()


def build(seed: int, rank: int = 0) -> Training:
    """12–16 latents of 128, 1–2 layers of them, 2 × 8 functions."""
    rng = parts.drawing("perceiver", seed)
    model = Perceiver(128, int(rng.choice([12, 16])), int(rng.integers(1, 3)))
    peak = parts.learning_rate(rng, 5e-4, 2e-3)
    t = Training(
        family="perceiver",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.98),
        batch=lambda number: functions(seed, number, 8),
        loss=loss,
        recipe="delayed",
        accumulate=2,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
    t.schedule = parts.warm_cosine(peak, t.steps, warm=24)
    return t
