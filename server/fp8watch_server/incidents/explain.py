"""A finding in words: title, place, evidence, cause with its verdict, what to change, what else it could be.

Upstream:   fp8watch_server.detect.playbook, fp8watch_server.incidents.words   Downstream: fp8watch_server.incidents.fold
Shapes:     Finding -> Explanation
Thread:     any; pure functions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.playbook import MODE_BY_SLUG
from fp8watch_server.incidents.fixes import fixes
from fp8watch_server.incidents.words import STATISTICAL_WORDS, WORDS, baseline, evidence, number, site_words, tile_words

__all__ = ["Explanation", "explain", "number", "site_words"]

LOSS_NOT_SEEN = "loss not seen: call watch.log(loss=...)"

_MAX_FINITE = {"E4M3": 448, "E5M2": 57344}

VERDICT_TEXT = {
    "fp8": "Verdict: FP8. A BF16 run would not do this here.",
    "shared": "Verdict: not FP8. BF16 would do the same.",
    "unknown": "Verdict: unknown. Confirm with the BF16 comparison: ten steps from the same checkpoint.",
}


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
    title, cause = _words(finding, facts)
    mode = MODE_BY_SLUG[finding.mode]
    return Explanation(
        title=title,
        verdict=finding.verdict,
        place=_place(finding, facts),
        evidence=[e.as_json() for e in finding.evidence],
        cause=f"{cause} {_verdict(finding)}",
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
            )
        ],
        alternatives=[{"mode": slug, "check": check} for slug, check in mode.alternatives],
    )


def _words(finding: Finding, facts: SiteFacts | None) -> tuple[str, str]:
    words = WORDS.get(finding.mode)
    if finding.extra.get("statistical"):
        words = STATISTICAL_WORDS.get(finding.mode, words)
    return words(finding, facts) if words is not None else (_title(finding, facts), _cause(finding, facts))


def _place(finding: Finding, facts: SiteFacts | None) -> dict[str, Any]:
    return {
        "ranks": [finding.rank],
        "module": facts.module if facts else None,
        "gemm": facts.gemm if facts else None,
        "operand": facts.operand if facts else None,
        "direction": facts.direction if facts else None,
        "tile": list(finding.tile) if finding.tile else None,
        "element": list(finding.element) if finding.element else None,
    }


def _title(finding: Finding, facts: SiteFacts | None) -> str:
    where, at, extra = site_words(facts), tile_words(finding), finding.extra
    if finding.mode == "inf-laundering":
        limit = _MAX_FINITE.get(facts.format if facts else "E4M3", 448)
        return f"Inf laundered to {limit} in {where}{at}"
    if finding.mode == "zero-tile-eps":
        return f"Zero tile without eps: scale_inv {number(evidence(finding, 'scale_inv_min'))} in {where}{at}"
    if finding.mode == "nan-in-loss":
        kind = "Inf" if extra.get("kind") == "inf" else "NaN"
        if not extra.get("forward_seen"):
            return f"Loss is {kind}"
        return f"Loss is {kind} while every measured FP8 operand of the forward is finite"
    if finding.mode == "nan-in-activation":
        kind = "Inf" if extra.get("kind") == "inf" else "NaN"
        if facts is not None and facts.operand == "weight":
            return f"{kind} is already in the weights: {where}{at}"
        origin = (
            ", perhaps out of a GEMM that is not observed" if extra.get("unobserved") else " from outside the GEMMs"
        )
        return f"{kind} reached {where}{origin}{at}"
    if finding.mode == "stale-weight-scale":
        return f"Stale scale on the weight of {facts.module if facts else '?'}: {_ratio(finding)}{at}"
    if finding.mode == "gradient-underflow":
        return f"Gradients quantised with a scale far too small in {where}: {_ratio(finding)}{at}"
    if finding.mode == "scale-rounding":
        roles = " and ".join(extra.get("operands", ())) or "an operand"
        return f"Scale of {roles} is off in {extra.get('num_sites', 1)} sites, first in {where}: {_ratio(finding)}{at}"
    if finding.mode == "optimizer-divergence":
        jump = extra.get("lr_jump")
        if jump and extra.get("by_loss"):
            moved = f"loss {number(baseline(finding, 'loss'))} → {number(evidence(finding, 'loss'))}"
            return f"Optimizer diverging: {moved} after LR {number(jump[0])} → {number(jump[1])}"
        because = f", LR {number(jump[0])} → {number(jump[1])}" if jump else ""
        return (
            f"Optimizer diverging: {extra.get('num_sites')} of {extra.get('num_moving')} weights grow at once{because}"
        )
    return f"{MODE_BY_SLUG[finding.mode].name} in {where}{at}"


def _ratio(finding: Finding) -> str:
    extra = finding.extra
    low, high = extra.get("ratio_min"), extra.get("ratio_max")
    above = high is not None and high > 1 + 2.0**-20
    return f"scale_ratio {number(high if above else low)}"


def _cause(finding: Finding, facts: SiteFacts | None) -> str:
    where, extra = site_words(facts), finding.extra
    element = f" at element ({finding.element[0]}, {finding.element[1]})" if finding.element else ""
    if finding.mode == "inf-laundering":
        limit = _MAX_FINITE.get(facts.format if facts else "E4M3", 448)
        return (
            f"{where} held Inf{element} before the cast. The tile's scale was forced to 1, the Inf was stored "
            f"as {limit}, and its neighbours were quantised unscaled: what is small against 1 loses its bits. Nothing behind "
            f"the cast sees the Inf."
        )
    if finding.mode == "zero-tile-eps":
        eps = facts.eps if facts else 0.0
        finite = " The operand itself is finite." if extra.get("operand_counted") else ""
        guard = "eps is 0 and the kernel has no zero guard" if eps == 0 else f"eps {number(eps)} did not guard it"
        return (
            f"A tile of {where} is zero or nearly so, {guard}: scale = FP8_MAX/amax became Inf, scale_inv 0, and "
            f"0·Inf is NaN in the codes.{finite} Every NaN behind it is a consequence."
        )
    if finding.mode == "nan-in-loss":
        if not extra.get("forward_seen"):
            return "The loss is not finite. No operand was measured in this step, so where it began is not known."
        return (
            f"The loss is not finite while all {extra['forward_seen']} measured inputs and weights of the step are: it "
            "was born in the loss or came with the data. Non-finite gradients of this step are its consequence."
        )
    if finding.mode == "nan-in-activation":
        if facts is not None and facts.operand == "weight":
            return (
                f"{where} was not finite before it was quantised{element}. A weight changes between steps: an update wrote "
                "it, or what loads or edits weights."
            )
        if extra.get("unobserved"):
            return (
                f"{where} is the first measured operand of the step that is not finite{element}, and no measured scale before it is "
                "broken. "
                f"Between it and the operand before it run GEMMs that are not observed: {', '.join(extra['unobserved'])}. "
                "One of them made it, or what lies around them: a norm, attention, an elementwise operation."
            )
        return (
            f"{where} is the first measured operand of the step that is not finite{element}, and no measured scale before "
            "it is broken: it was made outside the GEMMs, by a norm, attention, an elementwise operation or an embedding."
        )
    if finding.mode == "stale-weight-scale":
        return (
            f"The scale beside the codes of {where} does not belong to the weight that is multiplied: "
            "amax·scale/FP8_MAX is outside its bounds on weights only. The scale, or the cached weight, is of an "
            "earlier step."
        )
    if finding.mode == "gradient-underflow":
        return (
            f"The scale of {where} uses a small part of the FP8 range only, so small gradients become 0. It was taken "
            "from something larger than the tensor that was quantised, or an oversized eps set it."
        )
    if finding.mode == "scale-rounding":
        return (
            f"amax·scale/FP8_MAX of {where} is outside what rounding allows, and weights are not alone in it: the "
            "scale is rounded up, computed with a reciprocal, or corrupted. Above 1.036 the largest values are clipped."
        )
    if finding.mode == "optimizer-divergence":
        jump = extra.get("lr_jump")
        why = f" The LR went from {number(jump[0])} to {number(jump[1])}." if jump else ""
        if jump and extra.get("by_loss"):
            at = next((e.since_step for e in finding.evidence if e.field == "loss"), finding.step)
            health = evidence(finding, "quantiser_healthy")
            well = {"yes": " The quantisers are healthy.", "no": " The quantisers are not healthy either."}
            return (
                f"The LR went from {number(jump[0])} to {number(jump[1])} at step {finding.onset}, and the loss jumped from "
                f"{number(baseline(finding, 'loss'))} to {number(evidence(finding, 'loss'))} at step {at}: the updates are "
                f"too large.{well.get(str(health), ' The quantisers were not measured.')}"
            )
        holds = " The scale invariant holds." if extra.get("invariant_held") else ""
        return (
            f"The largest weights of {extra.get('num_sites')} of {extra.get('num_moving')} layers grow together, "
            f"{number(extra.get('growth'))} octaves a step: the updates are too large.{why}{holds}"
        )
    return f"{MODE_BY_SLUG[finding.mode].name} in {where}."


def _verdict(finding: Finding) -> str:
    text = VERDICT_TEXT[finding.verdict]
    if finding.mode == "inf-laundering" and finding.verdict == "fp8":
        text = "Verdict: FP8. In BF16 the Inf would have reached the loss; here it does its damage in silence."
    if not finding.extra.get("loss_given", True):
        text += f" ({LOSS_NOT_SEEN})" if not finding.extra.get("loss_seen") else " (no loss in this step)"
    return text
