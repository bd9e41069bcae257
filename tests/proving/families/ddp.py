"""Two processes over gloo: masked language modelling with a post-norm encoder, each rank with its own data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import IGNORED, generator, windows
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

MASK = 256


class Layer(nn.Module):
    """Attention, norm, MLP, norm: the norms are on the residual stream, as in BERT."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.intermediate, self.dense = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.output_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.attention_norm(x + self.output(y))
        out: Tensor = self.output_norm(x + self.dense(F.gelu(self.intermediate(x))))
        return out


class Encoder(nn.Module):
    """Tokens [B, T] -> logits [B, T, 257]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(257, dim)
        self.position_embeddings = nn.Embedding(64, dim)
        self.layer = nn.ModuleList(Layer(dim, 4) for _ in range(layers))
        self.decoder = nn.Linear(dim, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layer:
            x = layer(x)
        out: Tensor = self.decoder(x)
        return out


ROLES = {
    "blocks": r"layer\.\d+",
    "attention": r"layer\.\d+",
    "attention.q": r"layer\.\d+\.query",
    "attention.k": r"layer\.\d+\.key",
    "attention.v": r"layer\.\d+\.value",
    "attention.out": r"layer\.\d+\.output",
    "mlp.up": r"layer\.\d+\.intermediate",
    "mlp.down": r"layer\.\d+\.dense",
    "norm": r"layer\.\d+\.\w+_norm",
    "embedding": r"word_embeddings",
    "head": r"decoder",
}


def build(seed: int, rank: int = 0) -> Training:
    """2 layers of 128, 4 × 48 bytes a rank, a fifth of them masked."""
    rng = parts.drawing("ddp", seed)
    model = Encoder(128, 2)
    peak = parts.learning_rate(rng, 5e-4, 2e-3)

    def batch(number: int) -> dict[str, Tensor]:
        tokens = windows(seed, number, 4, 48)
        hidden = torch.rand(4, 48, generator=generator(seed, number, 1)) < 0.2
        return {"input_ids": tokens.masked_fill(hidden, MASK), "labels": tokens.masked_fill(~hidden, IGNORED)}

    t = Training(
        family="ddp",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.999),
        batch=batch,
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        world_size=2,
        rank=rank,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": True, "vocab": 257},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
