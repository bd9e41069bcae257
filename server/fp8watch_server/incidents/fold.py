"""Folds findings into incidents: one per cause and window, written with its message in the caller's transaction.

Upstream:   fp8watch_server.detect.engine (wired in fp8watch_server.app)
Downstream: fp8watch_server.incidents.messages
Shapes:     findings of one batch -> rows of incident, incident_event, outbox
Thread:     detect worker, inside one write transaction

Ranks deliver at their own pace, so a cause may arrive after its consequence. An incident therefore stores where in the
step it began (`flow`, in its first event): an earlier finding takes it over, and no second one opens. Later evidence
re-judges it in the same way: a cause that may have begun first, and explains the incident, replaces it. A failure that
began before a cause is no consequence of it, and stays, or opens, an incident of its own.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.detect.families.fault_why import EXPLAINED
from fp8watch_server.detect.finding import UNOBSERVED, Finding, SiteFacts
from fp8watch_server.detect.precedence import FADING, NONFINITE_MODES, PRECURSORS, SPREADING
from fp8watch_server.incidents.auto_resolve import CLOSE_AFTER_STEPS, close_quiet
from fp8watch_server.incidents.causes import cause_id, remember
from fp8watch_server.incidents.explain import Explanation, explain
from fp8watch_server.incidents.match import UNEXPLAINED, Open, covering, explained_by, root_of, target_of
from fp8watch_server.incidents.messages import write_escalated, write_firing, write_rejudged
from fp8watch_server.incidents.rows import IncidentChange, change_of, key_of, write_event
from fp8watch_server.incidents.stored import load, note_regression, resolved_near, was_resolved

__all__ = ["IncidentChange", "close_quiet", "fold"]

MAX_SITES, MAX_EVIDENCE = 256, 32
_SEVERITY = ("info", "warning", "critical")
_NOT_OURS = (
    "run_id",
    "tenant",
    "id",
    "status",
    "opened_at",
    "resolved_at",
    "seen_at",
    "owner",
    "closed_as",
    "regression_of",
)
"""Columns that an update leaves alone: its key, and what people say."""


def fold(
    conn: sa.Connection,
    run_id: str,
    tenant: str,
    attempt: int,
    findings: Sequence[Finding],
    sites: Mapping[int, SiteFacts],
    now: float,
    window_steps: int = 6,
    public_url: str = "",
    after_clean_steps: int = CLOSE_AFTER_STEPS,
) -> list[IncidentChange]:
    """Fold findings into the incidents of one attempt of a run.

    Args:
        conn: the caller's write transaction; all rows of this call are committed with it, or none.
        findings: of one or more batches, any order.
        sites: facts by site id, for the words.
        now: collector's clock, seconds since 1970.
        window_steps: observed steps within which the same mode is the same incident.
        public_url: of the collector, for the links of the message.
        after_clean_steps: as `close_quiet` is given.
    """
    if not findings:
        return []
    incidents = load(conn, run_id, tenant, attempt, schema.incident.c.status != "resolved")
    closed: list[Open] | None = None
    for finding in sorted(findings, key=lambda f: (f.step, f.rank_in_flow)):
        target = target_of(incidents, finding, window_steps, sites, after_clean_steps)
        if target is None:
            if root := root_of(incidents, finding, sites, window_steps):
                _mute(root, finding, sites)
                continue
            if taken := explained_by(incidents, finding, sites, window_steps):
                _absorb(taken, finding, sites, window_steps, takes_over=True)
                continue
            if finding.extra.get("consequence") and was_resolved(conn, run_id, tenant, attempt, finding):
                continue  # resolved by hand: its consequences open nothing
            if closed is None:
                closed = load(conn, run_id, tenant, attempt, resolved_near(findings, window_steps))
            as_bad = [i for i in closed if not _grew_worse(i.told_severity, finding.severity)]
            # what is worse than was told is a page of its own, which ends
            if late := covering(as_bad, finding, window_steps, sites):
                _absorb_late(late, finding, sites, window_steps)
                continue
            target = _new(run_id, tenant, attempt, finding, sites, now, window_steps)
            note_regression(conn, target)
            remember(conn, target.row)
            incidents.append(target)
            continue
        _absorb(target, finding, sites, window_steps)
    return [_write(conn, i, now, public_url) for i in [*incidents, *(closed or ())] if i.change is not None]


def _absorb_late(incident: Open, finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int) -> None:
    """Add late findings to a resolved incident without extending it: what goes on after it is a new one."""
    last_step = incident.row["last_step"]
    _absorb(incident, finding, sites, window_steps)
    incident.row["last_step"] = last_step


def _sites_of(finding: Finding) -> list[int]:
    named = [] if finding.site is None else [finding.site]
    return list(dict.fromkeys([*named, *finding.extra.get("sites", [])]))


def _new(
    run_id: str,
    tenant: str,
    attempt: int,
    finding: Finding,
    sites: Mapping[int, SiteFacts],
    now: float,
    window_steps: int,
) -> Open:
    words = explain(finding, sites)
    hit = _sites_of(finding)
    window = finding.onset // max(window_steps, 1)
    topic = [UNOBSERVED] if finding.topic == UNOBSERVED else []  # beside another of its mode
    identity = "\0".join([run_id, str(attempt), finding.mode, words.place["module"] or "", str(window), *topic])
    row: dict[str, Any] = {
        "run_id": run_id,
        "tenant": tenant,
        "id": uuid.uuid4().hex,
        "attempt": attempt,
        "mode": finding.mode,
        "severity": finding.severity,
        "status": "open",
        "first_step": finding.onset,
        "last_step": finding.step,
        "num_events": 1,
        "sites": hit[:MAX_SITES],
        "num_sites": max(len(hit), int(finding.extra.get("num_sites", 0))),
        "fingerprint": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        "opened_at": now,
        "resolved_at": None,
        "updated_at": now,
    }
    incident = Open(
        row=row,
        flow=0,
        stride=int(finding.extra.get("stride", 1)),
        weight_born=False,
        origin_rank=finding.rank,
        num_events=0,
        opened=finding.step,
        change="opened",
    )
    _place_at(incident, finding, words)
    incident.events.append(("opened", finding.step, _root(incident, finding, window_steps)))
    return incident


def _place_at(incident: Open, finding: Finding, words: Explanation) -> None:
    """Make the incident report this finding: it is the earliest known."""
    ranks = incident.row.get("place", {}).get("ranks", [])
    place = {**words.place, "ranks": sorted({*ranks, *words.place["ranks"]})}
    incident.row.update(
        mode=finding.mode,
        title=words.title,
        verdict=words.verdict,
        place=place,
        evidence=words.evidence,
        cause=words.cause,
        fix=words.fix,
        alternatives=words.alternatives,
        origin=finding.mode != "optimizer-divergence" and not finding.extra.get("weight_born", False),
        cause_id=cause_id(finding.mode, place),
    )
    incident.flow = finding.rank_in_flow
    incident.weight_born = bool(finding.extra.get("weight_born", False)) and finding.mode in NONFINITE_MODES
    incident.origin_rank = finding.rank


def _root(incident: Open, finding: Finding, window_steps: int) -> dict[str, Any]:
    stride = int(finding.extra.get("stride", 1))
    incident.kind, incident.earliest = finding.kind, finding.earliest(window_steps * stride)
    incident.topic = finding.topic
    incident.names |= {finding.scalar}
    named = {"scalar": finding.scalar} if finding.scalar else {}
    return {
        **named,
        "kind": incident.kind,
        "topic": incident.topic,
        "earliest": incident.earliest,
        "flow": incident.flow,
        "weight_born": incident.weight_born,
        "rank": finding.rank,
        "stride": stride,
        "mode": finding.mode,
        "title": incident.row["title"],
    }


def _mute(root: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> None:
    """Count a consequence in its open root incident, named once; without a message, but where it is critical behind a warning."""
    root.row["num_events"] += 1
    first = root.row["first_step"]  # an unseen cause may be older, but not older than it can have begun
    root.row["first_step"] = min(first, max(finding.onset, first if root.earliest is None else root.earliest))
    if finding.mode in SPREADING:  # values that it broke stay broken, weights run away: it is not over while they do
        root.row["last_step"] = max(root.row["last_step"], finding.step)
    if _grew_worse(root.row["severity"], finding.severity):
        root.row["severity"] = finding.severity
        root.row["cause"] += f" Behind it: {explain(finding, sites).title}."
    if finding.mode not in root.muted:
        root.muted |= {finding.mode}
        root.events.append(("updated", finding.step, {"muted": finding.mode, "sites": _sites_of(finding)[:16]}))
    root.change = root.change or "updated"


def _absorb(
    incident: Open, finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int, *, takes_over: bool = False
) -> None:
    row = incident.row
    earlier = (finding.onset, finding.rank_in_flow) < (row["first_step"], incident.flow) or _is_upstream(
        incident, finding, window_steps
    )
    worse = row["severity"] == "info" and finding.severity != "info"  # what was a notice is told by what made it more
    takes_over = takes_over or ((earlier or worse) and not finding.extra.get("consequence"))
    explains = _explains_it(row, finding)
    takes_over = (takes_over or explains) and (explains or not _is_explained(row, finding))
    first = min(row["first_step"], finding.onset)
    if takes_over and PRECURSORS.get(finding.mode) != row["mode"]:  # an earlier consequence is not the beginning
        first = max(first, finding.earliest(window_steps * int(finding.extra.get("stride", 1))))
    row["first_step"] = first
    row["last_step"] = max(row["last_step"], finding.step)
    row["num_events"] += 1
    told, row["severity"] = row["severity"], max(row["severity"], finding.severity, key=_SEVERITY.index)
    hit = _sites_of(finding)
    graver = row["severity"] != told and not finding.extra.get("consequence")
    if takes_over:
        old_mode = row["mode"]
        _place_at(incident, finding, explain(finding, sites))
        row["sites"] = list(dict.fromkeys([*hit, *row["sites"]]))[:MAX_SITES]
        root = _root(incident, finding, window_steps)
        incident.events.append(("updated", finding.step, {**root, "earlier_cause_than": old_mode}))
        incident.change = incident.change or "rerooted"
    elif graver and not _is_explained(row, finding):  # its message is about what made it so
        began = incident.flow, incident.weight_born, incident.origin_rank
        _place_at(incident, finding, explain(finding, sites))
        incident.flow, incident.weight_born, incident.origin_rank = began
        row["sites"] = list(dict.fromkeys([*hit, *row["sites"]]))[:MAX_SITES]
        incident.events.append(("updated", finding.step, {"graver_than": told, "title": row["title"]}))
        incident.change = incident.change or "updated"
    else:
        row["sites"] = list(dict.fromkeys([*row["sites"], *hit]))[:MAX_SITES]
        if finding.rank not in row["place"]["ranks"]:
            row["place"] = {**row["place"], "ranks": sorted({*row["place"]["ranks"], finding.rank})}
        incident.change = incident.change or "updated"
    if finding.scalar and finding.scalar not in incident.names:
        incident.names |= {finding.scalar}
        incident.events.append(("updated", finding.step, {"scalar": finding.scalar}))
    told = {e["field"] for e in row["evidence"]}
    news = [e.as_json() for e in finding.extra.get("news", ()) if e.field not in told]
    row["evidence"] = [*row["evidence"], *news][: max(MAX_EVIDENCE, len(row["evidence"]))]
    grown = max(row["num_sites"], len(row["sites"]), int(finding.extra.get("num_sites", 0)))
    if grown >= 2 * row["num_sites"]:  # spread is recorded at powers of two: a storm leaves a handful of events
        incident.events.append(("updated", finding.step, {"num_sites": grown}))
    row["num_sites"] = grown


def _is_upstream(incident: Open, finding: Finding, window_steps: int) -> bool:
    """Whether a site that began to fade within the window of the first comes before it in data flow."""
    row = incident.row
    if finding.mode not in FADING or row["mode"] != finding.mode or finding.rank_in_flow >= incident.flow:
        return False
    return finding.onset <= int(row["first_step"]) + window_steps * int(finding.extra.get("stride", 1))


def _is_explained(row: Mapping[str, Any], finding: Finding) -> bool:
    """Whether the cause of an incident was found already, and this finding of it has none."""
    known = any(e["field"] == EXPLAINED for e in row["evidence"])
    return known and row["mode"] == finding.mode and not finding.extra.get("why")


def _explains_it(row: Mapping[str, Any], finding: Finding) -> bool:
    """Whether a finding brings the cause of what an incident says without one, at its place."""
    if row["mode"] not in UNEXPLAINED or any(e["field"] == EXPLAINED for e in row["evidence"]):
        return False
    return bool(finding.extra.get("why")) and finding.extra.get("found_at") in row["sites"][:1]


def _reads_otherwise(told: tuple[str, str], row: Mapping[str, Any]) -> bool:
    """Whether later evidence changes the case: another batch to look for, or another verdict."""
    mode, verdict = told
    return bool(row["mode"] != mode and (verdict != row["verdict"] or mode == "bad-batch"))


def _grew_worse(told: str, severity: str) -> bool:
    """Whether an incident became critical after its message, or more than information."""
    return told not in ("", severity) and (severity == "critical" or told == "info")


def _write(conn: sa.Connection, incident: Open, now: float, public_url: str) -> IncidentChange:
    row, t = incident.row, schema.incident
    row["updated_at"] = now
    opened = incident.change == "opened"
    if opened:
        conn.execute(sa.insert(t).values(**row))
    else:
        values = {k: v for k, v in row.items() if k not in _NOT_OURS}
        conn.execute(sa.update(t).where(*key_of(t, row)).values(**values))
    for kind, step, detail in incident.events:
        incident.num_events += 1
        write_event(conn, row, incident.num_events, kind, now, step, detail)
    if opened:
        reason = write_firing(conn, row, now, public_url)
    elif row["status"] != "resolved" and _grew_worse(incident.told_severity, row["severity"]):
        reason = write_escalated(conn, row, now, public_url, was=incident.told_severity)
    elif incident.was_told is not None and row["status"] != "resolved" and _reads_otherwise(incident.was_told, row):
        reason = write_rejudged(conn, row, now, public_url, was=incident.was_told[0])
    else:
        reason = None
    if reason:
        write_event(conn, row, incident.num_events + 1, "updated", now, row["first_step"], {"message": reason})
    return change_of(row, incident.change or "updated")
