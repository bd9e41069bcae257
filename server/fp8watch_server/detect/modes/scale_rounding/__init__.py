"""Scale computed or rounded wrongly: mode 9, scale-rounding.

`families.invariant` finds it: scales that rounding does not explain.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.scale_rounding.words import fixes, words

MODE = Mode(
    number=9,
    slug="scale-rounding",
    alternatives=(
        ("stale-weight-scale", "only weights are off the invariant"),
        ("recipe-mismatch", "power_2_scale as registered is not what the kernel does"),
    ),
    words=words,
    fixes=fixes,
)
