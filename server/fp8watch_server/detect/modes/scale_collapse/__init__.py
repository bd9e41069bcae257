"""Scale collapsing: mode 22, scale-collapse."""

from __future__ import annotations

from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.scale_collapse.detector import Collapse
from fp8watch_server.detect.modes.scale_collapse.overflows import Overflows
from fp8watch_server.detect.modes.scale_collapse.words import fixes, words

MODE = Mode(
    number=22,
    slug="scale-collapse",
    alternatives=(
        ("outlier-growth", "one layer's amax grows, the scale follows"),
        ("optimizer-divergence", "the weights of most layers grow"),
        ("gradient-underflow", "gradients vanish while the scale stands"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("collapse_octaves", 3, "octaves", 0.5, 32, SPEC),
        threshold("collapse_window_steps", 100, "steps", 8, 100_000, SPEC),
        threshold("collapse_halvings", 3, "count", 1, 100, SPEC),
        threshold("collapse_skipped_steps", 20, "steps", 3, 10_000, "a loss scale of 65536 is down at 1 after 16"),
    ),
    detectors=(Collapse, Overflows),
)
