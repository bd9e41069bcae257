"""What is said of dying-tile: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, number, since, site_words
from fp8watch_server.detect.remedies import OPERANDS, TORCHAO, Fix, Place, set_to

GUARD = 1e-12
"""An eps with which no scale is Inf: what torchao's casts have."""


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    left = evidence(f, "steps_to_zero")
    ahead = f" At this rate it is zero in {left} steps." if left is not None else ""
    stands = " while its largest stands" if f.extra.get("stands") else ""
    guard = (
        f"Its eps of {number(s.eps)} keeps the scale finite: what is below becomes 0 in the cast."
        if s is not None and s.eps >= GUARD
        else f"Where a kernel has no guard, FP8_MAX/amax becomes Inf and the tile NaN.{ahead}"
    )
    return (
        f"A tile of {site_words(s)} is dying: amax {number(evidence(f, 'amax_min_nonzero'))}",
        f"The smallest tile of {site_words(s)} falls towards zero{since(f)}{stands}. {guard}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    feeds = Fix(
        "code",
        f"Look at what feeds {p.module}: one group of channels fades; weight decay on a gain, a gate that closed.",
    )
    if p.eps >= GUARD or p.backend == TORCHAO:
        return [feeds]
    kind, text = set_to(p.backend, [p.operand if p.operand in OPERANDS else "input"], GUARD, p.power_2_scale)
    return [
        Fix(kind, f"{text}; if tiles still degenerate, 1e-10."),
        feeds,
        Fix("code", "Or use a kernel that sets the scale of a zero tile to 1, as Transformer Engine's does."),
    ]
