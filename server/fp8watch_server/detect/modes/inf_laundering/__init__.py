"""Inf laundered by the cast: mode 17, inf-laundering.

`families.nonfinite` finds it: what of a step broke first.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.inf_laundering.words import fixes, words

MODE = Mode(
    number=17,
    slug="inf-laundering",
    alternatives=(
        ("nan-in-activation", "the loss turns NaN in the same step: the Inf did not stay inside the tile"),
        ("outlier-growth", "amax of the site grew for many steps before it reached Inf"),
    ),
    words=words,
    fixes=fixes,
    verdict_words={
        "fp8": "Verdict: FP8. In BF16 the Inf would have been seen in all that is computed from it; here the loss is finite.",
    },
)
