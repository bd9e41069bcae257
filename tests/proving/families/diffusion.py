"""A diffusion transformer on digits: 2×2 patches, adaptive layer norm from time and class, prediction of the noise,
current scaling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator, images
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("sklearn",)


class Block(nn.Module):
    """Shift, scale and gate of both branches come from the condition; their last layer begins at zero."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.modulation = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1).view(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.proj(y.transpose(1, 2).reshape(batch, tokens, dim))
        y = self.fc2(F.gelu(self.fc1(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh"))
        out: Tensor = x + gate2 * y
        return out


class DiT(nn.Module):
    """Noisy images [B, 8, 8], time [B] in 0…1, class [B] -> predicted noise [B, 8, 8]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.dim = dim
        self.patch = nn.Linear(4, dim)
        self.position = nn.Parameter(0.02 * torch.randn(16, dim))
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.final = nn.Linear(dim, 4)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        batch = len(image)
        patches = image.view(batch, 4, 2, 4, 2).transpose(2, 3).reshape(batch, 16, 4)
        rate = torch.exp(-math.log(10_000) * torch.arange(self.dim // 2) / (self.dim // 2))
        angle = 1000 * time[:, None] * rate
        condition = self.time(torch.cat((angle.sin(), angle.cos()), -1)) + self.label(label)
        x = self.patch(patches) + self.position
        for block in self.blocks:
            x = block(x, condition)
        noise: Tensor = self.final(self.norm(x))
        return noise.view(batch, 4, 4, 2, 2).transpose(2, 3).reshape(batch, 8, 8)


ROLES = {
    "blocks": r"blocks\.\d+",
    "attention": r"blocks\.\d+",
    "attention.qkv": r"blocks\.\d+\.qkv",
    "attention.out": r"blocks\.\d+\.proj",
    "mlp.up": r"blocks\.\d+\.fc1",
    "mlp.down": r"blocks\.\d+\.fc2",
    "norm": r"norm",
    "embedding": r"label",
}


def build(seed: int, rank: int = 0) -> Training:
    """2 layers of 128, 32 digits."""
    rng = parts.drawing("diffusion", seed)
    model = DiT(128, 2)
    rate = parts.learning_rate(rng, 5e-4, 2e-3)
    digits = images(seed, 32)

    def batch(number: int) -> dict[str, Tensor]:
        made = digits(number)
        random = generator(seed, number, 2)
        time = torch.rand(32, generator=random)
        noise = torch.randn(32, 8, 8, generator=random)
        dropped = torch.rand(32, generator=random) < 0.1
        return {
            "pixels": made["pixels"],
            "labels": made["labels"].masked_fill(dropped, 10),
            "time": time,
            "noise": noise,
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept = torch.cos(0.5 * math.pi * batch["time"])[:, None, None]
        noisy = kept * batch["pixels"] + (1 - kept**2).sqrt() * batch["noise"]
        return F.mse_loss(model(noisy, batch["time"], batch["labels"]), batch["noise"])

    return Training(
        family="diffusion",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0),
        batch=batch,
        loss=loss,
        recipe="current",
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "classes": 10},
    )
