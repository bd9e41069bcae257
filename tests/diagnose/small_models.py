"""Small models whose losses the diagnoses are held to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixer(nn.Module):
    """Norm, projections with a product between them, residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Classifier(nn.Module):
    """x [B, dim], classes [B] -> 0-d loss."""

    def __init__(self, dim: int = 64, layers: int = 3, classes: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(dim) for _ in range(layers))
        self.lm_head = nn.Linear(dim, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x), target)


def batch_of(seed: int = 0, rows: int = 256, dim: int = 64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=g)
    teach = torch.randn(dim, 16, generator=torch.Generator().manual_seed(99))
    return x, (x @ teach).argmax(1)


def trained(steps: int = 15, dim: int = 64, layers: int = 3) -> tuple[Classifier, torch.optim.AdamW]:
    torch.manual_seed(1)
    model = Classifier(dim, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch_of(step + 1, dim=dim)).backward()
        optimizer.step()
    return model, optimizer
