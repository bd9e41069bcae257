"""Frozen scale: mode 6, frozen-scale.

`families.delayed` finds it.
"""

from __future__ import annotations

from fp8watch_server.detect.families.delayed import Delayed
from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.frozen_scale.words import fixes, words

MODE = Mode(
    number=6,
    slug="frozen-scale",
    alternatives=(
        ("delayed-clip", "scale_inv moves in the step after the clip"),
        ("cross-rank-disagreement", "the scale answers to the amax of other ranks"),
        ("stale-weight-scale", "it is a weight, and its recipe is current scaling"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("frozen_clip_depth", 1.1, "ratio", 1.001, 1e6, SPEC),
        threshold("frozen_steps", 6, "steps", 2, 10, SPEC),
    ),
    detectors=(Delayed,),
)
