"""A vision transformer on digits: patches of 2×2, class token, torch's own encoder layers, label smoothing, random shifts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import generator, images
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("sklearn",)


class Layer(nn.Module):
    """Pre-norm encoder layer with separate q, k and v, and layer scale."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale1 = nn.Parameter(torch.full((dim,), 0.5))
        self.scale2 = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.scale1 * self.dense(y)
        out: Tensor = x + self.scale2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class ViT(nn.Module):
    """Images [B, 8, 8] -> logits [B, 10]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, 2, stride=2)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.encoder = nn.ModuleList(Layer(dim, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels[:, None]).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        for layer in self.encoder:
            x = layer(x)
        out: Tensor = self.classifier(self.norm(x).mean(1))
        return out


ROLES = {
    "blocks": r"encoder\.\d+",
    "attention": r"encoder\.\d+",
    "attention.q": r"encoder\.\d+\.query",
    "attention.k": r"encoder\.\d+\.key",
    "attention.v": r"encoder\.\d+\.value",
    "attention.out": r"encoder\.\d+\.dense",
    "mlp.up": r"encoder\.\d+\.fc1",
    "mlp.down": r"encoder\.\d+\.fc2",
    "norm": r"encoder\.\d+\.norm\d|norm",
    "embedding": r"patch_embed",
    "head": r"classifier",
}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, 32 digits."""
    rng = parts.drawing("vit", seed)
    model = ViT(128, int(rng.integers(2, 4)))
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    digits = images(seed, 32)

    def batch(number: int) -> dict[str, Tensor]:
        made = digits(number)
        shift = torch.randint(-1, 2, (2,), generator=generator(seed, number, 2)).tolist()
        return {"pixels": made["pixels"].roll(shift, (1, 2)), "labels": made["labels"]}

    t = Training(
        family="vit",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.05, beta2=0.999),
        batch=batch,
        loss=lambda m, b: F.cross_entropy(m(b["pixels"]), b["labels"], label_smoothing=0.1),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "classes": 10},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
