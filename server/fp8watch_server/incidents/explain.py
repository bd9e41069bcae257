"""A finding in words: title, place, evidence, cause with its verdict, what to change, what else it could be.

Shapes:     Finding -> Explanation
Thread:     any; pure functions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8watch_server.detect.finding import OBSERVED, Finding, SiteFacts
from fp8watch_server.detect.modes import MODE_BY_SLUG
from fp8watch_server.detect.phrases import number, site_words
from fp8watch_server.incidents.fixes import fixes

__all__ = ["Explanation", "explain", "number", "site_words"]

LOSS_NOT_SEEN = "loss not seen: call watch.log(loss=...)"

VERDICT_TEXT = {
    "fp8": "Verdict: FP8. A BF16 run would not do this here.",
    "shared": "Verdict: not FP8. BF16 would do the same.",
    "unknown": "Verdict: unknown. Confirm with the BF16 comparison: ten steps from the same checkpoint.",
}


OBSERVED_TEXT = "Verdict: FP8. This GEMM computes as before: it is what the recipe would do to it."
"""Of a site of which nothing is quantised."""


@dataclass(frozen=True)
class Explanation:
    """The words and numbers of an incident, as CONTRACT names them."""

    title: str
    verdict: str
    place: dict[str, Any]
    evidence: list[dict[str, Any]]
    cause: str
    fix: list[dict[str, str]]
    alternatives: list[dict[str, str]]


def explain(finding: Finding, sites: Mapping[int, SiteFacts]) -> Explanation:
    """Say what a finding means. A site that is not registered is named by its absence."""
    facts = sites.get(finding.site) if finding.site is not None else None
    extra = finding.extra
    jump = extra.get("lr_jump") or (None, None)
    mode = MODE_BY_SLUG[finding.mode]
    title, cause = mode.words(finding, facts)
    others = mode.alternatives_of(finding) if mode.alternatives_of is not None else None
    return Explanation(
        title=title,
        verdict=finding.verdict,
        place=_place(finding, facts),
        evidence=[e.as_json() for e in finding.evidence],
        cause=f"{cause} {_verdict(finding, facts)}",
        fix=[
            f.as_json()
            for f in fixes(
                finding.mode,
                module=facts.module if facts else None,
                operand=facts.operand if facts else None,
                operands=tuple(extra.get("operands", ())),
                eps=facts.eps if facts else 0.0,
                power_2_scale=facts.power_2_scale if facts else True,
                batch_id=extra.get("batch_id"),
                usual_lr=jump[0],
                lr=jump[1],
                extra=extra,
                backend=facts.backend if facts else "",
                verdict=finding.verdict,
                recipe=facts.recipe if facts and not facts.is_probe else "",
                format=facts.format if facts else "",
            )
        ],
        alternatives=[{"mode": slug, "check": check} for slug, check in others or mode.alternatives],
    )


def _place(finding: Finding, facts: SiteFacts | None) -> dict[str, Any]:
    return {
        "ranks": sorted(finding.extra.get("odd_ranks") or [finding.rank]),
        "module": facts.module if facts else None,
        "gemm": finding.extra.get("gemm", facts.gemm) if facts else None,
        "operand": facts.operand if facts else None,
        "direction": facts.direction if facts else None,
        "tile": list(finding.tile) if finding.tile else None,
        "element": list(finding.element) if finding.element else None,
        "expert": finding.extra.get("expert"),
    }


def _verdict(finding: Finding, facts: SiteFacts | None) -> str:
    text = MODE_BY_SLUG[finding.mode].verdict_words.get(finding.verdict, VERDICT_TEXT[finding.verdict])
    if finding.verdict == "fp8" and facts is not None and facts.recipe == OBSERVED and text in VERDICT_TEXT.values():
        text = OBSERVED_TEXT
    if not finding.extra.get("loss_given", True):
        text += f" ({LOSS_NOT_SEEN})" if not finding.extra.get("loss_seen") else " (no loss in this step)"
    return text
