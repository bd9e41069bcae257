"""What is said of kernel-output-fault: title, cause, and what to change."""

from __future__ import annotations

import math

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, expert_words, number
from fp8watch_server.detect.remedies import OWN_FORWARD, Fix, Place
from fp8watch_server.detect.switches import same_format

UNSEEN = " The module casts by itself and its codes are not seen: its quantiser can be the cause as well as its GEMM."


def _power(gain: float) -> str:
    log2 = math.log2(gain) if gain > 0 else 0.0
    return f"2^{round(log2)}" if abs(log2 - round(log2)) < 0.02 and round(log2) else number(gain)


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    module, gain = (s.module if s else "a module") + expert_words(f), f.extra.get("gain")
    if gain is not None:
        wrong, right = "/".join(f.extra.get("gemms", [])), " and ".join(f.extra.get("right_gemms", []))
        ok = f"; {right} is right" if right else ""
        return (
            f"{wrong} of {module} is {_power(gain)} of its shadow",
            f"The output of {wrong} of {module} is {_power(gain)} times what its operands give{ok}. A factor without noise is a scale that "
            "is missing or applied twice, or bytes that are read in another format: E5M2 read as E4M3 is 2^-7."
            + (UNSEEN if s and s.backend == OWN_FORWARD else ""),
        )
    if f.extra.get("wrong_output"):
        wrong, right = "/".join(f.extra.get("gemms", [])), " and ".join(f.extra.get("right_gemms", []))
        error, gain = number(evidence(f, "gemm_error")), number(evidence(f, "gemm_gain"))
        return (
            f"{wrong} of {module} is not the product of its operands: error {error}",
            f"On the sampled rows the output of {wrong} of {module} is off what its operands give by {error} of its RMS, with a "
            f"gain of {gain}{f', and {right} was not found wrong' if right else ''}. No accumulator loses that: rows that nobody "
            "wrote, codes or scales that are read at another place, or scales that are read in another format."
            + (UNSEEN if s and s.backend == OWN_FORWARD else ""),
        )
    gemm = (f.extra.get("gemm", s.gemm) or "dgrad or wgrad") if s else "A GEMM"
    tokens = f.extra.get("tokens")
    rows = (
        " It got no tokens: nothing was written into its output."
        if tokens == 0
        else f" It got {tokens} tokens."
        if tokens
        else ""
    )
    if not f.extra.get("operands_seen"):
        return (
            f"{gemm} of {module} returned NaN or Inf",
            f"The output of the {gemm if s else ''} GEMM of {module} is not finite. Its operands were not all measured, so whether "
            f"the kernel or what it was given did it is not known.{rows}",
        )
    return (
        f"{gemm} of {module} returned NaN or Inf from finite operands",
        f"Every operand of the {gemm if s else ''} GEMM of {module} is finite, and its output is not: FP8 is innocent, the kernel, "
        f"its padding or memory that nobody wrote is not.{rows}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.extra.get("gain") is not None:
        return [
            Fix(
                "code",
                "Check the formats that the kernel is told: E5M2 gradients read as E4M3 are too small by 2^-7."
                + same_format(p.backend),
            ),
            Fix("code", f"Check that each scale_inv is applied once in the GEMMs of {p.module}."),
            p.keep_out,
        ]
    if p.extra.get("wrong_output"):
        return [
            p.keep_out,
            Fix(
                "code",
                "Check what the kernel is told of its operands: strides and padding of codes and of scale_inv, and that scales are read as they were written (FP32, or powers of two in a byte).",
            ),
            Fix(
                "code",
                "Guard the kernel: allocate its output with zeros instead of empty, and see whether the error changes.",
            ),
            Fix("code", "Report it with the table of `fp8watch check-gemm`, which repeats it outside of training."),
        ]
    return [
        Fix(
            "code",
            f"Mask what no token wrote: zero the output of {p.module} where an expert got no tokens, and the padded rows.",
        ),
        Fix("code", "Guard the kernel: allocate its output with zeros instead of empty, and see whether the NaN goes."),
        Fix(
            "code",
            "Report it with shapes and token counts: the operands are finite, so it is a bug of the kernel."
            if p.extra.get("operands_seen")
            else "Look at the operands first: watch.shadow of this module measures them and the output together.",
        ),
    ]
