"""Expert apart from its siblings: mode 27, expert-outlier."""

from __future__ import annotations

from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.expert_outlier.detector import ExpertOutliers
from fp8watch_server.detect.modes.expert_outlier.words import fixes, words

MODE = Mode(
    number=27,
    slug="expert-outlier",
    alternatives=(
        (
            "silent-data-corruption",
            "the weight leaped in one step, no optimizer does that, and the others did not move",
        ),
        ("outlier-growth", "all experts of the parameter grew, or a parameter without experts"),
        ("optimizer-divergence", "the weights of most layers grow, and the learning rate leaped"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "expert_octaves", 5, "octaves", 1, 64, "a factor of 32; siblings of a healthy layer lie within two octaves"
        ),
    ),
    detectors=(ExpertOutliers,),
)
