"""Scalar shift: mode 25, scalar-shift.

Three find it: `detector` in what people log, `gradient_fall` in the gradient norm or, where that is not logged, in the
gradients themselves, `gradient_factor` in a norm that stands at a multiple of what it was.
"""

from __future__ import annotations

from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.scalar_shift.detector import ScalarShifts
from fp8watch_server.detect.modes.scalar_shift.gradient_factor import GradientFactor
from fp8watch_server.detect.modes.scalar_shift.gradient_fall import GradientFall
from fp8watch_server.detect.modes.scalar_shift.words import fixes, words

MODE = Mode(
    number=25,
    slug="scalar-shift",
    alternatives=(
        ("bad-batch", "the loss jumped in the same step: the data changed"),
        ("optimizer-divergence", "the learning rate leaped, or the weights of most layers grow"),
        ("chronic-quantization-noise", "the tile SQNR of some layer is under its band"),
        ("gradient-underflow", "gradients become 0 in the cast, while the loss is as it was"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("scalar_shift_sigma", 8, "ratio", 2, 1000, "an info: 6 values in a row this far out are no noise"),
        threshold("scalar_growth_octaves", 3, "octaves", 0.5, 64, "8 times what it was, over 128 values"),
        threshold("gradient_fall_octaves", 10, "octaves", 3, 140, "a loss scaled by 1e-9 is 30; late training drifts"),
        threshold("gradient_factor_octaves", 0.9, "octaves", 0.1, 64, "gradients that are accumulated twice double: 1"),
    ),
    detectors=(ScalarShifts, GradientFall, GradientFactor),
)
