"""Too much quantisation noise: mode 21, chronic-quantization-noise."""

from __future__ import annotations

from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.chronic_quantization_noise.clamped import Clamped
from fp8watch_server.detect.modes.chronic_quantization_noise.detector import Noise
from fp8watch_server.detect.modes.chronic_quantization_noise.words import fixes, words

MODE = Mode(
    number=21,
    slug="chronic-quantization-noise",
    alternatives=(
        ("delayed-clip", "clip depth is above 1 in the same steps"),
        ("outlier-growth", "kurtosis of the site is far above that of its like"),
        ("recipe-mismatch", "an eps of 1e-6 and more, or another format than meant"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("chronic_sqnr_e4m3_db", 28, "dB", 1, 60, SPEC),
        threshold("chronic_sqnr_e5m2_db", 22, "dB", 1, 60, SPEC),
        threshold(
            "chronic_sqnr_e2m1_db", 14, "dB", 1, 60, "20.4 dB of a normal distribution, 17.2 rounded stochastically"
        ),
        threshold("chronic_underflow", 0.10, "share", 0.001, 1, SPEC),
        threshold("sqnr_drop_db", 3, "dB", 0.1, 60, SPEC),
        threshold(
            "chronic_gain",
            0.005,
            "share",
            0.0001,
            1,
            "healthy operands of many elements: up to 0.0017; inputs of few columns, values of one size: more room",
        ),
    ),
    detectors=(Noise, Clamped),
)
