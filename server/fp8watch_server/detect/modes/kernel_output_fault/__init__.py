"""Kernel output fault: mode 19, kernel-output-fault.

`families.kernel_output` finds it by a shadow or a probe; `families.nonfinite` asks it what broke first.
"""

from __future__ import annotations

from fp8watch_server.detect.families.kernel_output import wrong_outputs
from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.kernel_output_fault.words import fixes, words

MODE = Mode(
    number=19,
    slug="kernel-output-fault",
    alternatives=(
        ("nan-in-activation", "an operand of that GEMM was not finite"),
        ("zero-tile-eps", "scale_inv of an operand is 0 or Inf"),
        ("silent-data-corruption", "only one rank, one host, and it does not come again: check the hardware"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("gemm_gain", 0.05, "ratio", 1e-3, 1, "a gain off by 5 % is no rounding"),
        threshold("gemm_wrong", 0.1, "ratio", 1e-3, 10, "a 14-bit accumulator loses 5.6 % RMS at K = 65536"),
    ),
    step_check=wrong_outputs,
    verdict_words={
        "shared": "Verdict: not FP8. Its range and its rounding did not make it; a BF16 GEMM is another kernel, and was not tried."
    },
)
