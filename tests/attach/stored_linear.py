"""What tests/attach/test_foreign_fp8.py and others share."""

from __future__ import annotations

import torch
from torch import nn


class StoredLinear(nn.Module):
    """As of checkpoints in FP8: the weight is codes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float().t()
