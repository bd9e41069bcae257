"""A masked-language encoder in BERT's names: post-norm, dropout, padded rows, a tied decoder with a bias, two micro-batches, LAMB
with a linear warm-up and decay, delayed scaling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import IGNORED, generator, windows
from proving.families import parts
from proving.families.optimizers import Lamb
from proving.training import Training
from torch import Tensor, nn

MASK, PAD, VOCAB, TOKENS = 256, 257, 272, 40
WARM = 24


class SelfAttention(nn.Module):
    """x [B, T, dim], keep [B, 1, 1, T] -> [B, T, dim]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            f(x).view(batch, tokens, self.num_heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        out: Tensor = self.dense(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class Layer(nn.Module):
    """Attention and MLP, each with dropout, added, and then normed."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.norm1 = SelfAttention(dim, num_heads), nn.LayerNorm(dim)
        self.intermediate, self.output, self.norm2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, keep)))
        out: Tensor = self.norm2(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))
        return out


class Bert(nn.Module):
    """Tokens [B, T] and a mask of them -> logits [B, T, vocabulary]."""

    def __init__(self, dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(VOCAB, dim), nn.Embedding(TOKENS, dim)
        self.norm = nn.LayerNorm(dim)
        self.layer = nn.ModuleList(Layer(dim, 4, dropout) for _ in range(layers))
        self.transform, self.transform_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, VOCAB)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.decoder.weight = self.word_embeddings.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.norm(self.word_embeddings(tokens) + self.position_embeddings(where))
        for layer in self.layer:
            x = layer(x, mask.bool()[:, None, None, :])
        out: Tensor = self.decoder(self.transform_norm(F.gelu(self.transform(x))))
        return out


ROLES = {
    "blocks": r"layer\.\d+",
    "attention": r"layer\.\d+\.attention",
    "attention.q": r"layer\.\d+\.attention\.query",
    "attention.k": r"layer\.\d+\.attention\.key",
    "attention.v": r"layer\.\d+\.attention\.value",
    "attention.out": r"layer\.\d+\.attention\.dense",
    "mlp.up": r"layer\.\d+\.intermediate",
    "mlp.down": r"layer\.\d+\.output",
    "norm": r"layer\.\d+\.norm\d|norm|transform_norm",
    "embedding": r"word_embeddings",
    "positions": r"position_embeddings",
    "head": r"decoder",
}


def masked(seed: int, rows: int, share: float, number: int) -> dict[str, Tensor]:
    """Rows of different lengths in which a share of the bytes is scored: three in five of those are hidden, one in five is another
    byte, one in five is left as it is."""
    tokens, random = windows(seed, number, rows, TOKENS), generator(seed, number, 1)
    length = torch.randint(TOKENS // 2, TOKENS + 1, (rows, 1), generator=random)
    there = torch.arange(TOKENS) < length
    scored = (torch.rand(tokens.shape, generator=random) < share) & there
    scored[:, 0] = True
    way = torch.rand(tokens.shape, generator=random)
    shown = torch.where(way < 0.6, MASK, torch.where(way < 0.8, tokens, tokens.roll(1, 0)))
    return {
        "input_ids": torch.where(scored, shown, tokens).masked_fill(~there, PAD),
        "attention_mask": there.long(),
        "labels": tokens.masked_fill(~scored, IGNORED),
    }


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, 2 × 6 rows of 20–40 bytes."""
    rng = parts.drawing("bert", seed)
    model = Bert(128, int(rng.integers(2, 4)), float(rng.choice([0.05, 0.1])))
    peak, share = parts.learning_rate(rng, 0.01, 0.025), float(rng.uniform(0.15, 0.25))
    t = Training(
        family="bert",
        model=model,
        optimizer=Lamb(model.parameters(), lr=peak),
        batch=lambda number: masked(seed, 6, share, number),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"], b["attention_mask"]), b["labels"]),
        recipe="delayed",
        accumulate=2,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": True, "vocab": VOCAB},
    )
    t.schedule = lambda step: peak * min((step + 1) / WARM, max(0.05, (t.steps - step) / (t.steps - WARM)))
    return t
