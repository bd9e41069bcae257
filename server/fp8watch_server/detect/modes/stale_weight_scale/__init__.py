"""Stale weight scale: mode 7, stale-weight-scale.

`families.invariant` finds it: scales that rounding does not explain.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.stale_weight_scale.words import fixes, words

MODE = Mode(
    number=7,
    slug="stale-weight-scale",
    alternatives=(
        ("scale-rounding", "inputs and gradients are off the invariant too"),
        ("silent-data-corruption", "one block of one rank only, and the weight hash differs between replicas"),
    ),
    words=words,
    fixes=fixes,
)
