"""What is said of accumulator-precision: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, number, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import split_accumulator


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    db = evidence(f, "operand_sqnr_db")
    well = (
        f", while its operands quantise well ({number(db)} dB)"
        if db is not None
        else "; its operands were not measured"
    )
    return (
        f"Accumulator too narrow in {site_words(s)}: error {number(evidence(f, 'gemm_error'))}",
        f"The output of the {s.gemm if s else ''} GEMM of {s.module if s else '?'} is off its shadow by "
        f"{number(evidence(f, 'gemm_error'))} RMS{well}: what is lost, is lost in the sum over "
        f"{number(evidence(f, 'contraction'))} products.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    return [
        *split_accumulator(p.backend),
        Fix("code", "Or a kernel that adds into FP32 registers each 128 products (promotion), as DeepGEMM's does."),
    ]
