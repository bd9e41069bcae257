"""Dead layer or expert: mode 4, dead-layer."""

from __future__ import annotations

from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.dead_layer.detector import DeadLayers
from fp8watch_server.detect.modes.dead_layer.standing import StandingWeights
from fp8watch_server.detect.modes.dead_layer.starved import StarvedExperts
from fp8watch_server.detect.modes.dead_layer.words import fixes, words

MODE = Mode(
    number=4,
    slug="dead-layer",
    alternatives=(
        ("dying-tile", "one tile falls, the largest stands"),
        ("gradient-underflow", "gradients become 0 in the cast: the underflow of the site rose, its amax did not fall"),
        ("bad-batch", "it lasts a step or two, with a masked batch"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("dead_octaves", 3, "octaves", 0.5, 64, SPEC),
        threshold("starved_looks", 8, "count", 2, 10000, "looks at an expert's input, while the others get tokens"),
        threshold(
            "standing_looks", 4, "count", 2, 10000, "looks at a weight that always moved: an update moves each element"
        ),
    ),
    detectors=(DeadLayers, StarvedExperts, StandingWeights),
)
