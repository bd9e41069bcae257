"""What is the caller's stays the caller's: gradients hidden, random generators restored.

Thread:     the caller's
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Hide gradients, and restore every random generator afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    kept = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    python, numpy = random.getstate(), np.random.get_state()
    for p, _ in kept:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for p in model.parameters():
            p.grad = None
        for p, grad in kept:
            p.grad = grad
        random.setstate(python)
        np.random.set_state(numpy)


class RandomState:
    """States of the random generators at one moment, for passes that must draw the same numbers."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Set them back."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
