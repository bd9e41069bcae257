"""Zero tile quantised without eps: mode 2, zero-tile-eps.

`families.nonfinite` finds it by `families.degenerate`: a scale that is no number, before anything else broke.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.zero_tile_eps.words import fixes, words

MODE = Mode(
    number=2,
    slug="zero-tile-eps",
    alternatives=(
        ("dying-tile", "amax_min_nonzero of the site fell for many steps before"),
        ("dead-layer", "every tile of the site is zero, and its gradients too"),
    ),
    words=words,
    fixes=fixes,
)
