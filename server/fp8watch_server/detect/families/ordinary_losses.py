"""Losses that are high and no jump: those that scatter by a factor, and those of batches that come in kinds.

Shapes:     losses of the last steps -> how far up is ordinary, or whether one came before
Thread:     detect worker
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import MAD_TO_SIGMA

SKEWED_SIGMA = 4.0
"""Of the logarithm of the loss: a loss of each 30,000, where it is that which is normal."""
KINDS = 3
"""Losses as high as a jump, each behind an ordinary one, from which on they are of a kind of batches."""
LOW, HIGH = 0.25, 0.7
"""Of a jump: up to the first a loss is ordinary, from the second on it is as high."""


def came_before(losses: tuple[float, ...], usual: float, loss: float) -> bool:
    """Whether batches come in kinds, of which one has such losses: several that were as high, each behind one that was not.
    Bad batches are not among them, for what was told is not learned."""
    high, low = usual + HIGH * (loss - usual), usual + LOW * (loss - usual)
    ordinary, came = False, 0
    for value in losses:
        if value <= low:
            ordinary = True
        elif value >= high and ordinary:
            ordinary, came = False, came + 1
    return came >= KINDS


def of_skewed(losses: npt.NDArray[np.floating[Any]], usual: float) -> float:
    """How far above its median a loss lies in health that scatters by a factor, as one that is weighted by rows or by rewards does: the
    spread of such losses says little of the largest. Less than 6 σ where they scatter by less than a fifth."""
    seen = losses.astype(np.float64)
    seen = seen[np.isfinite(seen)]
    if not len(seen) or not (seen > 0).all():
        return 0.0
    logs = np.log(seen)
    return usual * math.expm1(SKEWED_SIGMA * MAD_TO_SIGMA * float(np.median(np.abs(logs - np.median(logs)))))
