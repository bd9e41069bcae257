"""A weight that leaps, and the word that something wrote weights while no optimizer ran."""

from __future__ import annotations

import numpy as np
from detect.trace import Trace, healthy

from fp8watch_agent.training_names import MOMENTS_CHANGED, WEIGHTS_CHANGED, WEIGHTS_LOOKED, WRITTEN

AT, STEPS = 120, 160
FC2, Q = "layers.1.mlp.down_proj", "layers.0.attention.q_proj"


def leaping(octaves: float = 4.0) -> Trace:
    t = healthy(3, STEPS)
    t.grow(t.mask(FC2, "weight"), np.where(np.arange(STEPS) >= AT, octaves, 0.0))
    return t


def written(t: Trace, *steps: int, weights: int = 1, name: str = f"{WRITTEN}{FC2}.weight", moments: int = 0) -> Trace:
    said = {WEIGHTS_CHANGED: weights, MOMENTS_CHANGED: moments, WEIGHTS_LOOKED: 40, name: 1}
    for key, value in said.items():
        t.logs[key] = np.full(STEPS, np.nan)
        t.logs[key][list(steps)] = value
    t.absent_logs = True
    return t
