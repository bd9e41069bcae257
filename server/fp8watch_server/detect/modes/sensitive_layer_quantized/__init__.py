"""Sensitive layer on the FP8 path: mode 18, sensitive-layer-quantized.

`registry` asks `detector` when sites are registered.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.sensitive_layer_quantized.words import fixes, words

MODE = Mode(
    number=18,
    slug="sensitive-layer-quantized",
    alternatives=(("chronic-quantization-noise", "any other layer whose SQNR is under its band"),),
    words=words,
    fixes=fixes,
)
