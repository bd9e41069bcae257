"""A lasting trend that leads to a limit: mode 28, limit-ahead. Information: nothing has failed."""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.limit_ahead.detector import LimitsAhead
from fp8watch_server.detect.modes.limit_ahead.words import fixes, words

MODE = Mode(
    number=28,
    slug="limit-ahead",
    alternatives=(
        ("chronic-quantization-noise", "underflow has passed the limit already"),
        ("delayed-clip", "the clip depth is above 1 already"),
        ("attention-logit-growth", "the logits are above 100 already, or grow faster than this"),
    ),
    words=words,
    fixes=fixes,
    detectors=(LimitsAhead,),
)
