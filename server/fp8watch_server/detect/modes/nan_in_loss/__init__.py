"""NaN born in the loss or the data: mode 1, nan-in-loss.

`families.nonfinite` finds it: what of a step broke first.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.nan_in_loss.words import fixes, words

MODE = Mode(
    number=1,
    slug="nan-in-loss",
    alternatives=(
        ("bad-batch", "the loss was finite but far off, and came back within 5 steps"),
        ("kernel-output-fault", "a Linear's output is NaN although its operands are finite: put a probe on it"),
    ),
    words=words,
    fixes=fixes,
)
