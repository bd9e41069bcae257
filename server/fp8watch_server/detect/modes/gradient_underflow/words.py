"""What is said of gradient-underflow: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.families import update_words
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number, ratio, since, site_words, tile_words
from fp8watch_server.detect.remedies import Fix, Place, set_to
from fp8watch_server.detect.switches import gradients_in_e5m2


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause: as the count of what becomes 0 says it, or as the scale does."""
    if update_words.is_one(f.extra.get("kind")):
        return update_words.words(f)
    if f.extra.get("statistical"):
        clamped = f.extra.get("eps_tiles")
        eps = f" {clamped} tiles are clamped by eps {number(s.eps if s else 0)}." if clamped else ""
        return (
            f"Gradients underflow in {site_words(s)}: {number(evidence(f, 'underflow_ratio'))} of them become 0",
            f"The share of gradients that become 0 in the cast rose from {number(baseline(f, 'underflow_ratio'))} to "
            f"{number(evidence(f, 'underflow_ratio'))} in {site_words(s)}{since(f)}.{eps}",
        )
    return (
        f"Gradients quantised with a scale far too small in {site_words(s)}: {ratio(f)}{tile_words(f)}",
        f"The scale of {site_words(s)} uses a small part of the FP8 range only, so small gradients become 0. It was taken "
        "from something larger than the tensor that was quantised, or an oversized eps set it.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if update_words.is_one(kind := p.extra.get("kind", "")):
        return update_words.fixes(str(kind))
    kind, text = set_to(p.backend, ["grad_output"], 1e-12, p.power_2_scale)
    first = (
        Fix(kind, f"{text}: {p.eps:g} is in use, and may clamp gradients.")
        if p.eps > 1e-12
        else Fix("code", "Compute the scale from the gradient that is quantised, after loss scaling, in each step.")
    )
    return [
        first,
        *gradients_in_e5m2(p),
        Fix("code", "Check what divides or multiplies the gradient between its amax and its cast."),
    ]


def alternatives(f: Finding) -> tuple[tuple[str, str], ...] | None:
    """What else it could be, of gradients that are flushed on their way; None for the others."""
    kind = str(f.extra.get("kind", ""))
    return update_words.alternatives(kind) if update_words.is_one(kind) else None
