"""Two towers for retrieval: a history read by latents through cross-attention, an item as a bag, one large table of hashed bigrams
and one projection for both, a contrastive loss over the batch with a learnt temperature. Adafactor, row-wise Adagrad for the table."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import windows
from proving.families import parts
from proving.families.optimizers import Adafactor
from proving.training import Training
from torch import Tensor, nn

ROWS, WIDTH = 4096, 64
HISTORY, ITEM, NEXT = 64, 32, 16
"""Bytes of what is known, of an item, and of the item beyond what is known."""


class CrossAttention(nn.Module):
    """A few learnt latents read [B, T, dim] -> [B, latents, dim]."""

    def __init__(self, dim: int, num_latents: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.5 * torch.randn(num_latents, dim))
        self.to_q, self.to_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_v, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f, y in zip(
            (self.to_q, self.to_k, self.to_v), (latents, x, x), strict=True))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = latents + self.to_out(y)
        return out


class Tower(nn.Module):
    """Norm and a gated MLP, added."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate, self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))
        return out


class TwoTowers(nn.Module):
    """Histories [B, T] and items [B, S] of rows of the table -> similarities [B, B]."""

    def __init__(self, dim: int, num_latents: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, dim)
        nn.init.normal_(self.table.weight, std=0.5)
        self.place = nn.Parameter(0.1 * torch.randn(HISTORY - 1, dim))
        self.reader = CrossAttention(dim, num_latents)
        self.query_tower, self.item_tower = Tower(dim), Tower(dim)
        self.project = nn.Linear(dim, WIDTH, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        known = self.table(history)
        query = self.query_tower(known.mean(1, keepdim=True) + 0.1 * self.reader(known + self.place)).mean(1)
        query, item = (F.normalize(self.project(x), dim=-1) for x in (query, self.item_tower(self.table(item).mean(1))))
        out: Tensor = query @ item.t()
        return out * self.log_scale.clamp(max=math.log(50.0)).exp()


ROLES = {
    "attention": r"reader",
    "attention.q": r"reader\.to_q",
    "attention.k": r"reader\.to_k",
    "attention.v": r"reader\.to_v",
    "attention.out": r"reader\.to_out",
    "mlp.gate": r"\w+_tower\.gate",
    "mlp.up": r"\w+_tower\.up",
    "mlp.down": r"\w+_tower\.down",
    "norm": r"\w+_tower\.norm",
    "embedding": r"table",
}


def hashed(tokens: Tensor) -> Tensor:
    """Rows of the table for the bigrams of [B, T] bytes: [B, T − 1]."""
    return (tokens[:, :-1] * 7919 + tokens[:, 1:] * 104_729) % ROWS


def contrast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each history is to find its own item among those of the batch, and each item its history."""
    found = model(batch["history"], batch["item"])
    own = torch.arange(len(found))
    return (F.cross_entropy(found, own) + F.cross_entropy(found.t(), own)) / 2


def build(seed: int, rank: int = 0) -> Training:
    """A table of 4096 × 96 or 128, 48 pairs."""
    rng = parts.drawing("towers", seed)
    model = TwoTowers(int(rng.choice([96, 128])), int(rng.integers(4, 9)))
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    dense = [p for name, p in model.named_parameters() if name != "table.weight"]
    groups = [{"params": [model.table.weight], "rows": True, "lr_scale": 10.0}, {"params": dense}]

    def batch(number: int) -> dict[str, Tensor]:
        text = windows(seed, number, 48, HISTORY + NEXT)
        return {"history": hashed(text[:, :HISTORY]), "item": hashed(text[:, -ITEM:])}

    t = Training(
        family="towers",
        model=model,
        optimizer=Adafactor(groups, lr=peak),
        batch=batch,
        loss=contrast,
        clip_norm=5.0,
        log=lambda t, step: {"temperature": math.exp(-float(t.model.get_parameter("log_scale")))},
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "table_rows": ROWS},
    )
    t.schedule = lambda step: peak * min(1.0, (step + 1) / 16) * min(1.0, (40 / (step + 1)) ** 0.5)
    return t
