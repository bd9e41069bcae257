"""What tests/canary/test_healthy.py and others share."""

from __future__ import annotations

import torch
from torch import nn


class Tiny(nn.Module):
    """Two Linears and a residual, of FP8 by whoever makes them."""

    def __init__(self, linear):
        super().__init__()
        self.up, self.down = linear(160, 48), linear(48, 160)

    def forward(self, x):
        return (x + self.down(torch.tanh(self.up(x)))).square().mean()


LONG = 2000
"""Steps in which nothing may be raised (`make healthy`); CI runs a part of them."""
