"""Models and a recorder that keeps what it is handed, as in the room of attach; no variables of the host."""

from __future__ import annotations

import sys

import pytest
import torch
from attach.conftest import attach, mlp, refused_nothing, train_fixture
from torch import nn

from fp8watch.recipe.environment import (
    CURRENT_POWER_2_VARIABLE,
    EPS_VARIABLES,
    FP32_SCALES_VARIABLE,
    NVFP4_VARIABLES,
    POWER_2_VARIABLES,
)

__all__ = ["attach", "mlp", "refused_nothing", "train_fixture"]


@pytest.fixture(autouse=True)
def clean_host(monkeypatch):
    """No FP8 variable and no trainer's flag of whoever runs the tests."""
    names = (*EPS_VARIABLES.values(), *POWER_2_VARIABLES.values(), FP32_SCALES_VARIABLE, CURRENT_POWER_2_VARIABLE)
    names += tuple(NVFP4_VARIABLES.values())
    for name in (*names, "FP8WATCH_RECIPE", "FP8WATCH_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors on a busy machine: threads that wait for each other take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def linear():
    """Operands over twenty octaves: on tame data all power-of-two scales round alike, and directions look the same."""
    torch.manual_seed(0)

    def wide(*shape):
        return torch.randn(shape) * torch.exp2(torch.randint(-16, 4, shape))

    model = nn.Sequential(nn.Linear(64, 48))
    model[0].weight.data.copy_(wide(48, 64))
    return model, wide(40, 64).requires_grad_(), wide(40, 48) * 1e-3
