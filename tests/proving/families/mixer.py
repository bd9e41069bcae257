"""Convolutions and an MLP-mixer on drawn figures: no attention. Lookahead around Nesterov momentum, gradients clipped by value, a rate in
cosine cycles of which each begins at half of the one before, current scaling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.families.optimizers import Lookahead
from proving.training import Training
from torch import Tensor, nn

SIZE, PATCHES = 16, 16
CYCLE = 56


class Layer(nn.Module):
    """Linears along the patches, then along the channels: x [B, 16, dim] -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_up, self.token_down = nn.Linear(PATCHES, 64), nn.Linear(64, PATCHES)
        self.channel_up, self.channel_down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        along = self.norm1(x).transpose(1, 2)
        x = x + self.token_down(F.gelu(self.token_up(along))).transpose(1, 2)
        out: Tensor = x + self.channel_down(F.gelu(self.channel_up(self.norm2(x))))
        return out


class Mixer(nn.Module):
    """Images [B, 16, 16] -> logits [B, 10]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, dim // 2, 3, padding=1)
        self.patches = nn.Conv2d(dim // 2, dim, 4, stride=4)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(F.relu(self.stem(pixels[:, None]))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.classifier(self.norm(x).mean(1))
        return out


ROLES = {
    "blocks": r"layers\.\d+",
    "mlp.up": r"layers\.\d+\.\w+_up",
    "mlp.down": r"layers\.\d+\.\w+_down",
    "norm": r"layers\.\d+\.norm\d|norm",
    "embedding": r"stem",
    "head": r"classifier",
}


def figures(seed: int, number: int, rows: int) -> dict[str, Tensor]:
    """Ten kinds of figures at any place, of any size and brightness, under noise: pixels [rows, 16, 16] about −1…1."""
    random = generator(seed, number)
    kind = torch.randint(0, 10, (rows,), generator=random)
    middle = 5 + 6 * torch.rand(2, rows, 1, 1, generator=random)
    radius, gain = (low + span * torch.rand(rows, 1, 1, generator=random) for low, span in ((3.0, 3.0), (1.4, 0.6)))
    grid = torch.arange(SIZE)
    y, x = grid[:, None] - middle[0], grid - middle[1]
    far, box = (y.square() + x.square()).sqrt(), torch.maximum(y.abs(), x.abs())
    inside = box <= radius
    shapes = torch.stack([
        far <= radius, (far - radius).abs() < 1, inside, (box - radius).abs() < 1,
        inside & ((y.abs() < 1) | (x.abs() < 1)), inside & ((y - x).abs() < 1.5), inside & ((y + x).abs() < 1.5),
        inside & (y.long() % 3 == 0), inside & (x.long() % 3 == 0), inside & (y > x),
    ])  # fmt: skip
    chosen = shapes[kind, torch.arange(rows)].float()
    return {"pixels": gain * chosen - 1 + 0.2 * torch.randn(rows, SIZE, SIZE, generator=random), "labels": kind}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 96 or 128, 48 figures."""
    rng = parts.drawing("mixer", seed)
    model = Mixer(int(rng.choice([96, 128])), int(rng.integers(2, 4)))
    peak, every = parts.learning_rate(rng, 0.02, 0.05), int(rng.integers(4, 9))
    return Training(
        family="mixer",
        model=model,
        optimizer=Lookahead(model.parameters(), lr=peak, weight_decay=5e-4, every=every),
        batch=lambda number: figures(seed, number, 48),
        loss=lambda m, b: F.cross_entropy(m(b["pixels"]), b["labels"], label_smoothing=0.05),
        recipe="current",
        clip_norm=None,
        clip_value=float(rng.uniform(0.05, 0.2)),
        schedule=lambda step: (
            peak * 0.5 ** (step // CYCLE) * (0.1 + 0.45 * (1 + math.cos(math.pi * (step % CYCLE) / CYCLE)))
        ),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "classes": 10},
    )
