"""Why codes or a product are wrong, where the training process has found it: the hypothesis that held, and its numbers.

Shapes:     a step, a site -> a kind and numbers, and how they change a finding
Thread:     detect worker
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8watch_agent.fault_names import COPY_STALE, SETTINGS, SHARE, Why, decode
from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.step_view import SiteTable, StepView

IN_EFFECT = "in-effect"
"""`extra["kind"]` of a recipe-mismatch: another setting than the recipe's quantises the operand."""
EXPLAINED = "explained"
"""Evidence of a finding whose cause is known."""


def of(view: StepView, site: SiteFacts) -> Why | None:
    """What the step says of a site."""
    return decode(view.logs(), f"{site.module}.{site.operand}.{site.direction}")


def told(found: Finding, why: Why | None) -> Finding:
    """A finding of codes that are wrong, with its cause: another setting of the recipe is a recipe-mismatch."""
    if why is None:
        return found
    extra: dict[str, Any] = {**found.extra, "why": why.kind, "numbers": dict(why.numbers), "found_at": found.site}
    evidence = (*found.evidence, _evidence(found, why))
    if why.kind in SETTINGS:
        extra["kind"] = IN_EFFECT
        return replace(found, mode="recipe-mismatch", evidence=evidence, extra=extra)
    return replace(found, evidence=evidence, extra=extra)


def told_of_product(found: Finding, why: Why | None, table: SiteTable, site: SiteFacts) -> Finding:
    """A finding of a product that is not that of its operands: one of an older weight is a fault of the copy of the weight."""
    if why is None or why.kind != COPY_STALE:
        return found
    columnwise = site.gemm == "dgrad"
    weights = [f for f in table.facts if f.module == site.module and f.operand == "weight"]
    weights.sort(key=lambda f: (f.direction == "columnwise") != columnwise)
    at = found.site if not weights else weights[0].id
    extra: dict[str, Any] = {
        **found.extra, "why": why.kind, "numbers": dict(why.numbers), "found_at": found.site, "operands": ["weight"],
        "sites": list(dict.fromkeys([at, *found.extra["sites"]])), "gemm": site.gemm,
        "direction": "columnwise" if columnwise else "rowwise",
    }  # fmt: skip
    return replace(
        found, mode="quantiser-fault", site=at, evidence=(*found.evidence, _evidence(found, why)), extra=extra
    )


def numbers(extra: Mapping[str, Any]) -> dict[str, float]:
    """Those of the hypothesis."""
    return dict(extra.get("numbers") or {})


def _evidence(found: Finding, why: Why) -> Evidence:
    return Evidence(EXPLAINED, round(100 * why.numbers[SHARE], 2), None, "% of what was wrong", found.step)
