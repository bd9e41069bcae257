"""Tile dying away: mode 3, dying-tile."""

from __future__ import annotations

from fp8watch_server.detect.limits import SPEC, TUNED, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.dying_tile.detector import Dying
from fp8watch_server.detect.modes.dying_tile.words import fixes, words

MODE = Mode(
    number=3,
    slug="dying-tile",
    alternatives=(
        ("dead-layer", "all tiles of the site fall, and its gradients too"),
        ("zero-tile-eps", "the tile is zero already: scale_inv is 0 or not finite"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("dying_log2_amax", -90, "octaves", -149, 0, SPEC),
        threshold("dying_fall_octaves", 6, "octaves", 1, 140, TUNED),
    ),
    detectors=(Dying,),
)
