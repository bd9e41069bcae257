"""Puts the traces of a case through an engine, ranks interleaved as they would come."""

from __future__ import annotations

from itertools import zip_longest

from detect.scenarios import Case, Expected

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding, facts_of
from fp8watch_server.detect.thresholds import DEFAULTS, Thresholds


def play(
    case: Case, thresholds: Thresholds = DEFAULTS, every: int = 1, engine: DetectionEngine | None = None
) -> list[Finding]:
    """Findings of a case, in order."""
    first = case.traces[0]
    engine = engine or DetectionEngine(first.facts, thresholds)
    for sessions in case.sessions:
        engine.add_sessions(sessions)
    found: list[Finding] = []
    for together in zip_longest(*(t.batches(case.per_batch, every) for t in case.traces)):
        for batch in together:
            if batch is None:
                continue
            for step in [
                s for s in case.sites_at if batch.header.step0 <= s < batch.header.step0 + batch.header.num_steps
            ]:
                engine.add_sites(facts_of(case.sites_at.pop(step)))
            found += engine.observe(batch)
    return found


def causes(found: list[Finding]) -> list[Finding]:
    """Without consequences, the first of each mode."""
    out: dict[str, Finding] = {}
    for f in found:
        if not f.extra.get("consequence"):
            out.setdefault(f.mode, f)
    return list(out.values())


def place_is_right(engine_sites: dict, finding: Finding, expected: Expected) -> bool:
    """Module and operand as expected."""
    facts = engine_sites.get(finding.site) if finding.site is not None else None
    if expected.module is not None and (facts is None or expected.module not in facts.module):
        return False
    return not (expected.operand is not None and (facts is None or facts.operand != expected.operand))
