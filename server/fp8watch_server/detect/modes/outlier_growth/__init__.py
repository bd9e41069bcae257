"""Outliers growing in one layer: mode 11, outlier-growth.

`families.outlier` finds it, and `families.corruption` where what leaped goes on growing.
"""

from __future__ import annotations

from fp8watch_server.detect.families.corruption import Corruption
from fp8watch_server.detect.families.outlier import Outliers
from fp8watch_server.detect.limits import SPEC, TUNED, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.outlier_growth.words import fixes, words

MODE = Mode(
    number=11,
    slug="outlier-growth",
    alternatives=(
        ("optimizer-divergence", "most layers grow together"),
        ("attention-logit-growth", "it is the q and the k projection of one attention"),
        ("silent-data-corruption", "it is a leap in one step, not a slope"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("outlier_weight_octaves", 0.8, "octaves", 0.05, 16, "healthy layers part by 0.6 octave in 100 steps"),
        threshold("outlier_input_octaves", 1.5, "octaves", 0.2, 16, TUNED),
        threshold("outlier_leap_octaves", 6, "octaves", 1, 64, SPEC),
        threshold("outlier_kurtosis_octaves", 1.0, "octaves", 0.1, 16, TUNED),
        threshold("outlier_layers", 0.4, "share", 0.01, 0.9, "one layer or a few: more is the optimizer"),
    ),
    detectors=(Corruption, Outliers),
)
