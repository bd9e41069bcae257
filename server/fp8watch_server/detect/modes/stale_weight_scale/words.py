"""What is said of stale-weight-scale: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import ratio, site_words, tile_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import fresh_weights


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    return (
        f"Stale scale on the weight of {s.module if s else '?'}: {ratio(f)}{tile_words(f)}",
        f"The scale beside the codes of {site_words(s)} does not belong to the weight that is multiplied: "
        "amax·scale/FP8_MAX is outside its bounds on weights only. The scale, or the cached weight, is of an "
        "earlier step.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    return [
        *fresh_weights(p.backend),
        Fix("code", "If it persists without a cache, lower the LR by 10 to 20 %."),
    ]
