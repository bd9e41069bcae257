"""Static facts of a run as they come in: which are news, and at which step that is to be said.

Upstream:   fp8watch_server.detect.sessions  Downstream: fp8watch_server.detect.engine
Shapes:     sites and sessions -> findings, once each
Thread:     detect worker

Facts come with a registration, which has no step: what they give waits for the first step that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect import sessions as s
from fp8watch_server.detect.cross_rank_step import Now
from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.sessions import Change, SessionFacts

KEEP_NEWEST = 16
KEEP_EACH = 50
MAX_KEPT = 64


class Registry:
    """What sites and sessions say of themselves."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionFacts] = {}
        self._newest: dict[int, SessionFacts] = {}  # of each rank
        self._changes: list[Change] = []
        self._changed_sites: dict[int, SiteFacts] = {}
        self._fresh_sites: list[SiteFacts] = []
        self._told_modules: set[str] = set()
        self._said: set[tuple[str, str, str]] = set()

    def add_sites(self, old: Mapping[int, SiteFacts], new: Mapping[int, SiteFacts]) -> None:
        """Sites that are new, or whose facts changed."""
        seen: dict[tuple[str, str, str], Change] = {}
        for i, facts in new.items():
            before = old.get(i)
            if before is None:
                self._fresh_sites.append(facts)
                continue
            for change in s.site_changes(facts, before):
                seen.setdefault((change.fact, str(change.value), str(change.baseline)), change)
                self._changed_sites[i] = facts
        self._changes += seen.values()

    def add_session(self, facts: SessionFacts) -> bool:
        """A session; False where it was known."""
        if self.sessions.get(facts.session) == facts:
            return False
        again = facts.session in self.sessions
        self.sessions[facts.session] = facts
        before = self._newest.get(facts.rank)
        if again or (before is not None and before.attempt > facts.attempt):
            return True
        self._newest[facts.rank] = facts
        changes = s.own_contradictions(facts)
        if before is not None:
            changes += s.differences(facts, before, "the session before")
        for other in self._newest.values():
            if other.rank != facts.rank and other.attempt == facts.attempt:
                changes += s.differences(facts, other, f"rank {other.rank}")
                break
        changes += s.coverage(facts, before)
        for change in changes:
            key = (change.fact, str(change.value), str(change.baseline))
            if key not in self._said:
                self._said.add(key)
                self._changes.append(change)
        return True

    @property
    def attempt(self) -> int:
        """The newest attempt of any rank."""
        return max((f.attempt for f in self._newest.values()), default=0)

    def ranks(self) -> list[int]:
        """Ranks that have registered for the newest attempt."""
        return sorted(r for r, f in self._newest.items() if f.attempt == self.attempt)

    def facts(self, rank: int) -> Mapping[str, Any]:
        """What the newest session of a rank says of itself."""
        session = self._newest.get(rank)
        return session.facts if session is not None else {}

    def findings(self, step: int, rank: int) -> list[Finding]:
        """What was registered since the last step."""
        found = []
        if self._changes:
            known = {c.fact.partition(".")[0] for c in self._changes}
            named = list(self._changed_sites.values())
            found.append(s.mismatch(self._changes, step, rank, named, resumed="fingerprint" in known))
            self._changes, self._changed_sites = [], {}
        if self._fresh_sites:
            fresh, self._fresh_sites = self._fresh_sites, []
            untold = (f for f in fresh if f.module not in self._told_modules)
            sensitive = s.sensitive(untold, step, rank, self.facts(rank))
            if sensitive is not None:
                self._told_modules |= set(sensitive.extra["modules"])
                found.append(sensitive)
        return found


class ScaleHistory:
    """Scales of the attempts before, to say at a resume whether they continue. Only of scales with a memory."""

    def __init__(self) -> None:
        self._kept: dict[int, npt.NDArray[np.float32]] = {}
        self._first = True

    def restart(self) -> None:
        """A new attempt begins: its first step is compared."""
        self._first = True

    def observe(self, now: Now, limit_octaves: float) -> Finding | None:
        """Compare the first step of an attempt, keep the others."""
        scale = np.where(~now.table.current_scaling, -now.log2_scale_inv, np.nan)
        if np.all(np.isnan(scale)):
            return None
        first, self._first = self._first, False
        found = self._compare(now, scale, limit_octaves) if first and self._kept else None
        self._keep(now.step, scale.astype(np.float32))
        return found

    def _keep(self, step: int, scale: npt.NDArray[np.float32]) -> None:
        for later in [kept for kept in self._kept if kept > step]:  # of the attempt before: this one writes its own
            del self._kept[later]
        self._kept[step] = scale
        old = [kept for kept in sorted(self._kept)[:-KEEP_NEWEST] if kept % KEEP_EACH]
        for dropped in old:
            del self._kept[dropped]
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]

    def _compare(self, now: Now, scale: npt.NDArray[np.float64], limit_octaves: float) -> Finding | None:
        before = [kept for kept in self._kept if kept <= now.step]
        if not before:
            return None
        saved_step = max(before)
        kept = self._kept[saved_step].astype(np.float64)
        saved = np.full(len(scale), np.nan)
        saved[: len(kept)] = kept
        moved = scale - saved
        known = ~np.isnan(moved)
        if not known.any():
            return None
        off = known & (np.abs(np.nan_to_num(moved)) > limit_octaves)
        if np.count_nonzero(off) * 2 <= np.count_nonzero(known):
            return None
        rows = now.in_flow(off)
        row = int(rows[0])
        evidence = [
            Evidence("scale", float(f"{2.0 ** scale[row]:.6g}"), float(f"{2.0 ** saved[row]:.6g}"), "1", saved_step),
            Evidence("moved_scales", len(rows), 0, f"of {int(np.count_nonzero(known))} scales", now.step),
            Evidence("median_move", round(float(np.median(moved[known])), 2), 0, "octaves", now.step),
        ]
        change = ("scale", evidence[0].value, evidence[0].baseline, f"step {saved_step} of the attempt before")
        return now.finding("recipe-mismatch", "warning", rows, evidence, "fp8", changes=[change], resumed=True)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one mode and step as one: the first keeps its place, evidence and changes are put together."""
    out: dict[str, Finding] = {}
    for f in findings:
        first = out.get(f.mode)
        if first is None:
            out[f.mode] = f
            continue
        sites = list(dict.fromkeys([*first.extra["sites"], *f.extra["sites"]]))
        named = first if first.site is not None or f.site is None else f
        extra = {**first.extra, "sites": sites, "num_sites": max(len(sites), first.extra["num_sites"])}
        if f.extra.get("news"):
            extra["news"] = [*first.extra.get("news", ()), *f.extra["news"]]
        if "changes" in extra:
            extra["changes"] = [*first.extra["changes"], *f.extra.get("changes", [])][:16]
        out[f.mode] = Finding(**{**named.__dict__, "evidence": (*first.evidence, *f.evidence)[:16], "extra": extra})
    return list(out.values())
