"""Non-finite value from outside the GEMMs: mode 23, nan-in-activation.

`families.nonfinite` finds it: what of a step broke first; `families.unobserved` names what nobody watches before it.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.nan_in_activation.words import fixes, words

MODE = Mode(
    number=23,
    slug="nan-in-activation",
    alternatives=(
        ("kernel-output-fault", "the Linear before it got finite operands: put a probe on its output"),
        ("nan-in-loss", "the forward operands are finite and only the loss is NaN"),
    ),
    words=words,
    fixes=fixes,
)
