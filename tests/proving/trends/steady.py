"""Nothing is planted: what a forecast says here, the training does by itself."""

from __future__ import annotations

import numpy as np
from proving.training import Training
from proving.trends._base import STEPS, Trend


class Steady(Trend):
    """The family's own training, as long as the others."""

    name = "steady"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Steady:
        return cls(step=STEPS, steps=STEPS, path="even", drawn={})
