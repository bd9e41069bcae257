"""Accumulator too narrow: mode 16, accumulator-precision.

`families.kernel_output` finds it, by a shadow of the GEMM.
"""

from __future__ import annotations

from fp8watch_server.detect.families.kernel_output import wrong_outputs
from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.accumulator_precision.words import fixes, words

MODE = Mode(
    number=16,
    slug="accumulator-precision",
    alternatives=(
        ("kernel-output-fault", "the gain is a factor other than 1: no noise, a wrong scale"),
        ("chronic-quantization-noise", "tile_sqnr_db of the operands is low already"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "gemm_error", 0.002, "ratio", 1e-6, 1, "a 14-bit accumulator without promotion: 0.35 % RMS at K = 4096"
        ),
    ),
    step_check=wrong_outputs,
)
