"""What families share: drawn hyperparameters, schedules, roles of modules, and the pieces of a small transformer."""

from __future__ import annotations

import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from proving.data import next_bytes
from torch import Tensor, nn

WARM_STEPS = 20
NOT_FP8 = ("head", "router")
"""Roles that the default precision map leaves out."""


def drawing(family: str, seed: int) -> np.random.Generator:
    """The numbers by which one person's training differs from another's."""
    return np.random.default_rng([seed, zlib.crc32(family.encode())])


def learning_rate(rng: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def warm_cosine(peak: float, steps: int, warm: int = WARM_STEPS, floor: float = 0.1) -> Callable[[int], float]:
    """Linear warm-up, then a cosine to `floor` of the peak."""

    def rate(step: int) -> float:
        if step < warm:
            return peak * (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def roles(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, Any]:
    """Role -> names of modules that match the role's pattern as a whole, in the model's order; absent where none does."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Any] = {}
    for role, pattern in patterns.items():
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if matching:
            found[role] = matching
    left_out = {name for role in NOT_FP8 for name in found.get(role, ())}
    found["linears"] = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in left_out]
    return found


def adamw(model: nn.Module, lr: float, weight_decay: float = 0.1, beta2: float = 0.95) -> torch.optim.AdamW:
    """Weights of two dimensions decay, all others do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, beta2))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of [B, T, vocabulary] and [B, T]; −100 is not scored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class RMSNorm(nn.Module):
    """x / rms(x), times a learned gain."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


FOLDER = Path(__file__).parents[3] / "build" / "proving" / "base"


def trained_once(name: str, make: Callable[[], nn.Module], steps: int, seed: int) -> dict[str, Tensor]:
    """Weights of a causal model of transformers behind so many steps on the first half of the text, kept as a file of that name."""
    path = FOLDER / f"{name}-{steps}.pt"
    if not path.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            batch_of = next_bytes(seed, 16, 48, (0.0, 0.5))
            for step in range(steps):
                batch = batch_of(step)
                optimizer.zero_grad()
                next_token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
                optimizer.step()
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as file:
            torch.save(model.state_dict(), file)
        os.replace(file.name, path)
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on [B, heads, T, head_dim]."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** -(torch.arange(half) / half))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, over `scaled_dot_product_attention`."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, head = num_heads, num_kv_heads, dim // num_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q = rotate(self.wq(x).view(batch, tokens, self.num_heads, -1).transpose(1, 2))
        k = rotate(self.wk(x).view(batch, tokens, self.num_kv_heads, -1).transpose(1, 2))
        v = self.wv(x).view(batch, tokens, self.num_kv_heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_kv_heads != self.num_heads)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class SwiGLU(nn.Module):
    """w2(silu(w1(x)) · w3(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Norm, attention, norm, MLP, each added to the residual stream."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, num_heads, num_kv_heads)
        self.ffn_norm, self.feed_forward = RMSNorm(dim), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, head: [B, T] int64 -> logits [B, T, vocabulary]."""

    def __init__(self, vocab: int, dim: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


LLAMA_ROLES = {
    "blocks": r"layers\.\d+",
    "attention": r"layers\.\d+\.attention",
    "attention.q": r"layers\.\d+\.attention\.wq",
    "attention.k": r"layers\.\d+\.attention\.wk",
    "attention.v": r"layers\.\d+\.attention\.wv",
    "attention.out": r"layers\.\d+\.attention\.wo",
    "mlp.gate": r"layers\.\d+\.feed_forward(\.experts\.\d+)?\.w1",
    "mlp.up": r"layers\.\d+\.feed_forward(\.experts\.\d+)?\.w3",
    "mlp.down": r"layers\.\d+\.feed_forward(\.experts\.\d+)?\.w2",
    "router": r"layers\.\d+\.feed_forward\.router",
    "experts": r"layers\.\d+\.feed_forward\.experts\.\d+",
    "norm": r"layers\.\d+\.\w+_norm|norm",
    "embedding": r"tok_embeddings",
    "head": r"output",
}
"""Names of torchtitan's Llama."""


def llama(rng: np.random.Generator, vocab: int = 256) -> Decoder:
    """A small Llama with drawn width, depth and heads."""
    dim, layers = int(rng.choice([128, 192])), int(rng.integers(2, 4))
    kv = int(rng.choice([1, 2]))
    return Decoder(vocab, dim, [Block(dim, 4, kv, SwiGLU(dim, 2 * dim)) for _ in range(layers)])
