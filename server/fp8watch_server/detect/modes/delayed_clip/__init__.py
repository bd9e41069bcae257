"""Outlier clipped by a delayed scale: mode 5, delayed-clip.

`families.delayed` finds it.
"""

from __future__ import annotations

from fp8watch_server.detect.families.delayed import Delayed
from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.delayed_clip.words import fixes, words

MODE = Mode(
    number=5,
    slug="delayed-clip",
    alternatives=(
        ("frozen-scale", "scale_inv is the same for six steps and more while it clips"),
        ("outlier-growth", "amax grew for many steps before: the chart of the site shows a slope"),
        ("cross-rank-disagreement", "other ranks have another scale for the same tensor"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("clip_depth", 1.5, "ratio", 1.01, 1e6, SPEC),
        threshold("clip_depth_grad_output", 16, "ratio", 1.01, 1e6, SPEC),
        threshold("clip_sqnr_db", 24, "dB", 1, 60, SPEC),
    ),
    detectors=(Delayed,),
)
