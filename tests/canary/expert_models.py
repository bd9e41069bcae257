"""What tests/canary/test_public_kernel_faults.py and others share."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """Two experts behind a Linear; the last one gets no token in one step."""

    def __init__(self, expert, step):
        super().__init__()
        self.step = step
        self.a, self.e0, self.e1 = nn.Linear(160, 160), expert(160, 160), expert(160, 160)
        self.calls = 0

    def forward(self, x):
        cut = len(x) if self.calls == self.step else len(x) // 2
        x, self.calls = self.a(x), self.calls + 1
        return torch.cat((self.e0(x[:cut]), self.e1(x[cut:]))).square().mean()
