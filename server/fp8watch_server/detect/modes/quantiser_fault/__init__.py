"""What a GEMM reads is not its operand: mode 24, quantiser-fault."""

from __future__ import annotations

from fp8watch_server.detect.limits import SPEC, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.quantiser_fault.detector import quantiser_faults
from fp8watch_server.detect.modes.quantiser_fault.words import fixes, words

MODE = Mode(
    number=24,
    slug="quantiser-fault",
    alternatives=(
        ("stale-weight-scale", "the scale invariant is broken on weights only: scale or codes are of an earlier step"),
        ("kernel-output-fault", "what the GEMM reads is right, and what it returns is not"),
        ("silent-data-corruption", "only one rank, one host, and it does not come again: check the hardware"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("destroyed_sqnr_db", 3, "dB", 0.1, 20, SPEC),
        threshold("destroyed_gain", 0.05, "share", 0.001, 1, "of many elements no rounding to nearest comes near it"),
    ),
    step_check=quantiser_faults,
)
