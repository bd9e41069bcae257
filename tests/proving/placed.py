"""A fault that has a place in a tiny training, and steps of that, for the tests of the faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving import tiny
from proving.faults import FAULTS
from proving.loop import Seams, train_step
from proving.training import Change, Training

TRIES = 20
"""Draws until one has a place."""


def with_fault(name: str, kind: str = "tied", severity: str = "severe", seed: int = 0) -> tuple[Training, Any]:
    """A training of `tiny.KINDS`, and the fault as the first seed draws it that finds a place in it."""
    torch.manual_seed(0)
    t = tiny.KINDS[kind]()
    for number in range(seed, seed + TRIES):
        fault = FAULTS[name].draw(np.random.default_rng(number), t, severity)
        if fault is not None:
            return t, fault
    raise AssertionError(f"{name} has no place in {kind}")


def steps_of(t: Training, first: int, last: int, change: Change) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each."""
    return [train_step(t, t.model, step, Seams(change), None) for step in range(first, last)]
