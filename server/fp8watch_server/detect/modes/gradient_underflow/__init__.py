"""Gradients quantised with a scale far too small: mode 8, gradient-underflow.

Three find it: `families.invariant` a scale far too small, `detector` by the count of what becomes 0, `families.weight_updates` by
gradients that are 0 when they arrive at the optimizer.
"""

from __future__ import annotations

from fp8watch_server.detect.families.weight_updates import WeightUpdates
from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.gradient_underflow.detector import Underflow
from fp8watch_server.detect.modes.gradient_underflow.words import alternatives, fixes, words

MODE = Mode(
    number=8,
    slug="gradient-underflow",
    alternatives=(
        ("scale-rounding", "the ratio is above 1 instead of far below"),
        ("scale-collapse", "the GradScaler's scale fell step by step before"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("underflow_points", 0.05, "share", 0.001, 1, SPEC),
        threshold(
            "underflow_alarm_points", 0.08, "share", 0.001, 1, "a change of domain moves healthy gradients by 6 points"
        ),
    ),
    detectors=(Underflow, WeightUpdates),
    alternatives_of=alternatives,
)
