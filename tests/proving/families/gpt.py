"""GPT-2 in nanoGPT's names: LayerNorm, fused qkv, learned positions, GELU, tied head. The model returns its loss; nothing is logged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import next_bytes
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (y.view(batch, tokens, self.num_heads, -1).transpose(1, 2) for y in self.c_attn(x).split(dim, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), SelfAttention(dim, num_heads)
        self.ln_2, self.mlp = nn.LayerNorm(dim), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """tokens, targets [B, T] -> 0-d loss."""

    def __init__(self, vocab: int, dim: int, layers: int, num_heads: int, max_tokens: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, dim),
                "wpe": nn.Embedding(max_tokens, dim),
                "h": nn.ModuleList(Block(dim, num_heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return parts.next_token_loss(self.lm_head(self.transformer["ln_f"](x)), targets)


ROLES = {
    "blocks": r"transformer\.h\.\d+",
    "attention": r"transformer\.h\.\d+\.attn",
    "attention.qkv": r"transformer\.h\.\d+\.attn\.c_attn",
    "attention.out": r"transformer\.h\.\d+\.attn\.c_proj",
    "mlp.up": r"transformer\.h\.\d+\.mlp\.c_fc",
    "mlp.down": r"transformer\.h\.\d+\.mlp\.c_proj",
    "norm": r"transformer\.h\.\d+\.ln_\d|transformer\.ln_f",
    "embedding": r"transformer\.wte",
    "head": r"lm_head",
}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128 or 192, 8 × 48 bytes."""
    rng = parts.drawing("gpt", seed)
    dim, layers = int(rng.choice([128, 192])), int(rng.integers(2, 4))
    model = GPT(256, dim, layers, 4, 64)
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    t = Training(
        family="gpt",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 8, 48),
        loss=lambda m, b: m(b["input_ids"], b["labels"]),
        logs=False,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
