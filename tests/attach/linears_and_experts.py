"""A model with Linears and experts, of which attach takes over both."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """As transformers' experts: one weight of all, multiplied expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.view(4, -1, 64), self.up).view(-1, 64)


class Model(nn.Module):
    """Two Linears and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.experts, self.last = (
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            Experts(),
            nn.Linear(64, 64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(self.norm(self.first(x)))).square().mean()
