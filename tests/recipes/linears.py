"""What tests/recipes/test_gemms.py and others share."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def run(model, x, grad):
    y = model(x)
    y.backward(grad)
    return y.detach(), x.grad, model[0].weight.grad


@pytest.fixture
def linear():
    """Operands over twenty octaves: on tame data all power-of-two scales round alike, and directions look the same."""
    torch.manual_seed(0)

    def wide(*shape):
        return torch.randn(shape) * torch.exp2(torch.randint(-16, 4, shape))

    model = nn.Sequential(nn.Linear(64, 48))
    model[0].weight.data.copy_(wide(48, 64))
    return model, wide(40, 64).requires_grad_(), wide(40, 48) * 1e-3
