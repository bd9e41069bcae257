"""Whether a batch cannot wait: it holds a non-finite value, or a scale that no rounding explains.

Shapes:     a checked batch -> bool
Thread:     any; pure

Cheap: columns at their default are omitted, so a healthy batch has next to nothing to look at.
"""

from __future__ import annotations

import numpy as np

from fp8watch_agent.record import QUANTISER_FAULTS, STEP_SCALARS
from fp8watch_agent.wire import Batch

BROKEN_COUNTS = (
    "num_nan", "num_inf", "num_sentinel_tiles", "num_off_scale_tiles", "output_num_nonfinite", "num_nonfinite_outputs",
    *QUANTISER_FAULTS,
)  # fmt: skip
"""Counts that are 0 in every record of a healthy step."""
BROKEN_SCALARS = ("loss", "grad_norm")


def is_urgent(batch: Batch) -> bool:
    """Whether a batch holds a non-finite value, or a scale that no rounding explains."""
    steps = batch.steps
    for name in BROKEN_SCALARS:
        broken = ~np.isfinite(steps[name])
        if broken.any() and (broken & ((steps["present"] & STEP_SCALARS[name]) != 0)).any():
            return True
    return any(name in batch.sent and bool(batch.sent[name].any()) for name in BROKEN_COUNTS)
