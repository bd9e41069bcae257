"""Static facts of a run as they come in: which are news, and at which step that is to be said.

Shapes:     sites and sessions -> findings, once each
Thread:     detect worker

Facts come with a registration, which has no step: what they give waits for the first step that follows; what a session gives,
for a step of its own, for a new one may register before the last batches of the one before it are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fp8watch_server.detect import sessions as s
from fp8watch_server.detect.families import experts
from fp8watch_server.detect.finding import UNOBSERVED, Finding, SiteFacts
from fp8watch_server.detect.modes.recipe_mismatch.detector import loaded, mismatch
from fp8watch_server.detect.modes.sensitive_layer_quantized.detector import sensitive
from fp8watch_server.detect.sessions import FLAG, Change, SessionFacts
from fp8watch_server.detect.step_view import SiteTable

SETTINGS = (
    "recipe",
    "amax_history_len",
    "amax_compute_algo",
    "margin",
    "input.format",
    "weight.format",
    "grad_output.format",
)
"""Facts of a session that fixes would set: what is set already is not advised."""
MAX_MERGED = 32
"""Pieces of evidence, and changes, that findings of one mode and step keep together."""


class Registry:
    """What sites and sessions say of themselves."""

    _of: frozenset[str] = frozenset()
    """Sessions that brought the changes; none in a state from before they were kept."""

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
        known = self.sessions.get(facts.session)
        again = known is not None
        self.sessions[facts.session] = facts
        changes = s.blind(facts, known)
        before = self._newest.get(facts.rank)
        if again or (before is not None and before.attempt > facts.attempt):
            if known is not None:  # what only running shows, a load for one, comes with the session or later
                held = s.own_contradictions(known)
                changes += [c for c in s.own_contradictions(facts) if c not in held]
            self._note(changes, facts.session)
            return True
        self._newest[facts.rank] = facts
        changes += s.own_contradictions(facts)
        if before is not None:
            changes += s.differences(facts, before, "the session before")
            changes += s.settings_changed(facts, before)
        for other in self._newest.values():
            if other.rank != facts.rank and other.attempt == facts.attempt:
                changes += s.differences(facts, other, f"rank {other.rank}")
                break
        changes += s.coverage(facts, before)
        self._note(changes, facts.session)
        return True

    def _note(self, changes: Iterable[Change], session: str) -> None:
        for change in changes:
            key = (change.fact, str(change.value), str(change.baseline))
            if key not in self._said:
                self._said.add(key)
                self._changes.append(change)
                self._of |= {session}

    @property
    def attempt(self) -> int:
        """The newest attempt of any rank."""
        return max((f.attempt for f in self._newest.values()), default=0)

    def attempt_of(self, session: str) -> int:
        """Number of the attempt of a session, from 1; 0: it has not registered."""
        known = self.sessions.get(session)
        return 0 if known is None else known.attempt

    def ranks(self) -> list[int]:
        """Ranks that have registered for the newest attempt."""
        attempt = self.attempt
        return sorted(r for r, f in self._newest.items() if f.attempt == attempt)

    def facts(self, rank: int) -> Mapping[str, Any]:
        """What the newest session of a rank says of itself."""
        session = self._newest.get(rank)
        return session.facts if session is not None else {}

    def context(self, found: Finding, table: SiteTable) -> dict[str, Any]:
        """What the session of a finding adds to it: the expert of its tile, and what the recipe sets already."""
        facts = self.facts(found.rank)
        flags = {name: facts.get(FLAG + "fp8_" + name) for name in SETTINGS}
        already = {name: facts.get(name, flags[name]) for name in SETTINGS}
        return {
            **experts.context(found, table, facts),
            "already": {name: value for name, value in already.items() if value not in (None, "")},
        }

    def findings(self, step: int, rank: int, session_id: str, table: SiteTable) -> list[Finding]:
        """What was registered since the last step, told with one of the session that brought it."""
        found = []
        if self._changes and (not self._of or session_id in self._of):
            changed = [c for c in self._changes if c.fact != s.BLIND_FACT]
            unobserved = [c for c in self._changes if c.fact == s.BLIND_FACT]
            named = list(self._changed_sites.values()) or loaded(changed, table.facts)
            session, facts = self._newest.get(rank), self.facts(rank)
            backend = session.backend if session is not None else ""
            resumed = any(c.fact.partition(".")[0] == "fingerprint" for c in changed)
            if changed:
                found.append(mismatch(changed, step, rank, named, resumed=resumed, backend=backend, facts=facts))
            if unobserved:  # has an end of its own
                found.append(mismatch(unobserved, step, rank, backend=backend, facts=facts))
            self._changes, self._changed_sites, self._of = [], {}, frozenset()
        if self._fresh_sites:
            fresh, self._fresh_sites = self._fresh_sites, []
            untold = (f for f in fresh if f.module not in self._told_modules)
            hit = sensitive(untold, step, rank, self.facts(rank))
            if hit is not None:
                self._told_modules |= set(hit.extra["modules"])
                found.append(hit)
        return found


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one mode and step as one: the first keeps its place, evidence and changes are put together. What nobody observes
    stays apart."""
    out: dict[tuple[str, bool], Finding] = {}
    for f in findings:
        what = f.mode, f.topic == UNOBSERVED
        first = out.get(what)
        if first is None:
            out[what] = f
            continue
        sites = list(dict.fromkeys([*first.extra["sites"], *f.extra["sites"]]))
        named = first if first.site is not None or f.site is None else f
        extra = {**first.extra, "sites": sites, "num_sites": max(len(sites), first.extra["num_sites"])}
        if f.extra.get("news"):
            extra["news"] = [*first.extra.get("news", ()), *f.extra["news"]]
        if "changes" in extra:
            extra["changes"] = [*first.extra["changes"], *f.extra.get("changes", [])][:MAX_MERGED]
        out[what] = Finding(
            **{**named.__dict__, "evidence": (*first.evidence, *f.evidence)[:MAX_MERGED], "extra": extra}
        )
    return list(out.values())
