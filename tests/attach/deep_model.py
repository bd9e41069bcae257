"""What tests/attach/test_rotation.py and test_resting.py share."""

from __future__ import annotations

from torch import nn


class Deep(nn.Module):
    """Six Linears of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x):
        return self.layers(x).square().mean()
