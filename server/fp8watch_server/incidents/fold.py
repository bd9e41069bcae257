"""Findings become incidents: one per cause and window, written with its message in the caller's transaction.

Upstream:   fp8watch_server.detect.engine, fp8watch_server.incidents.explain  Downstream: fp8watch_server.notify.outbox
Shapes:     findings of one batch -> rows of incident, incident_event, outbox
Thread:     detect worker, inside one write transaction

Ranks deliver at their own pace, so a cause may arrive after its consequence. An incident therefore remembers where in
the step it began (`flow`, in its first event): a finding that is earlier takes it over, and no second one opens.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from fp8watch_server.detect.finding import NONFINITE_MODES, Finding, SiteFacts
from fp8watch_server.store import schema

from .explain import Explanation, explain
from .messages import write_firing
from .quiet import CLOSE_AFTER_STEPS, close_quiet
from .rows import IncidentChange, change_of, key_of, write_event

__all__ = ["IncidentChange", "close_quiet", "fold"]

MAX_SITES = 256
_SEVERITY = ("info", "warning", "critical")
_SPREADING = NONFINITE_MODES | {"optimizer-divergence"}


@dataclass
class _Open:
    """An open incident while findings are folded in."""

    row: dict[str, Any]
    flow: int
    weight_born: bool
    origin_rank: int
    num_events: int  # rows of incident_event
    ranks: frozenset[int] = frozenset()  # as stored
    change: Literal["opened", "updated", "rerooted"] | None = None
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


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
) -> list[IncidentChange]:
    """Fold findings into the incidents of one attempt of a run.

    Args:
        conn: the caller's write transaction; all rows of this call are committed with it, or none.
        findings: of one or more batches, any order.
        sites: facts by site id, for the words.
        now: collector's clock, seconds since 1970.
        window_steps: observed steps within which the same mode is the same incident.
        public_url: of the collector, for the links of the message.
    """
    if not findings:
        return []
    status = schema.incident.c.status
    incidents = _load(conn, run_id, tenant, attempt, status != "resolved")
    closed: list[_Open] | None = None
    for finding in sorted(findings, key=lambda f: (f.step, f.rank_in_flow)):
        target = _target(incidents, finding, window_steps)
        if target is None:
            if finding.extra.get("consequence") and _was_resolved(conn, run_id, tenant, attempt, finding):
                continue  # closed by hand: what follows from it opens nothing
            if closed is None:
                closed = _load(conn, run_id, tenant, attempt, status == "resolved")
            if late := _covering(closed, finding, window_steps):
                _absorb_late(late, finding, sites)
                continue
            target = _new(run_id, tenant, attempt, finding, sites, now, window_steps)
            incidents.append(target)
            continue
        _absorb(target, finding, sites)
    return [_write(conn, i, now, public_url) for i in [*incidents, *(closed or ())] if i.change is not None]


def _load(conn: sa.Connection, run_id: str, tenant: str, attempt: int, status: sa.ColumnElement[bool]) -> list[_Open]:
    t, e = schema.incident, schema.incident_event
    rows = conn.execute(
        sa.select(t)
        .where(t.c.run_id == run_id, t.c.tenant == tenant, t.c.attempt == attempt, status)
        .order_by(t.c.first_step)
    )
    out = []
    for row in list(rows.mappings()):
        events = list(
            conn.execute(
                sa.select(e.c.kind, e.c.detail)
                .where(e.c.run_id == run_id, e.c.tenant == tenant, e.c.incident_id == row["id"])
                .order_by(e.c.seq)
            )
        )
        roots = [detail for kind, detail in events if "flow" in detail]
        root = roots[-1] if roots else {}
        out.append(
            _Open(
                row=dict(row),
                flow=int(root.get("flow", 0)),
                weight_born=bool(root.get("weight_born", False)),
                origin_rank=int(root.get("rank", 0)),
                num_events=len(events),
                ranks=frozenset(row["place"].get("ranks", ())),
            )
        )
    return out


def _target(incidents: Sequence[_Open], finding: Finding, window_steps: int) -> _Open | None:
    """The open incident that this finding belongs to."""
    stride = int(finding.extra.get("stride", 1))
    window = window_steps * stride

    def near(i: _Open) -> bool:
        return bool(i.row["first_step"] - window <= finding.step <= i.row["last_step"] + window)

    def here(i: _Open) -> bool:
        """The same place, within the clean steps that would have closed it: whether or not the closing came by yet."""
        quiet = CLOSE_AFTER_STEPS * stride
        same_place = finding.site in i.row["sites"][:1]
        return same_place and bool(i.row["first_step"] - quiet < finding.step < i.row["last_step"] + quiet)

    same = [i for i in incidents if i.row["mode"] == finding.mode]
    for i in same:
        if near(i) or here(i):
            return i
    if finding.mode not in NONFINITE_MODES:
        return same[-1] if same and finding.extra.get("consequence") else None
    family = [i for i in incidents if i.row["mode"] in _SPREADING and near(i)]
    for i in family:
        spread = finding.extra.get("weight_born") or finding.extra.get("consequence")
        if spread and finding.step >= i.row["first_step"]:
            return i
        if i.weight_born and finding.step <= i.row["first_step"]:
            return i  # its cause, from a rank that came later
        if finding.step == i.row["first_step"] and finding.rank != i.origin_rank:
            return i  # what is shared between ranks broke in all of them at once
    return same[-1] if same and finding.extra.get("consequence") else None


def _covering(closed: Sequence[_Open], finding: Finding, window_steps: int) -> _Open | None:
    """The resolved incident that a finding belongs to: a rank, or a spool, that was later than the clean steps."""
    window = window_steps * int(finding.extra.get("stride", 1))
    for i in closed:
        after = 0 if finding.rank in i.ranks else window  # of a rank that was seen, what comes after it is news
        within = i.row["first_step"] - window <= finding.step <= i.row["last_step"] + after
        if within and i.row["mode"] == finding.mode:
            return i
    return None


def _absorb_late(incident: _Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> None:
    """Fold into an incident that is over, without making it longer: what goes on after it is news."""
    last_step = incident.row["last_step"]
    _absorb(incident, finding, sites)
    incident.row["last_step"] = last_step


def _was_resolved(conn: sa.Connection, run_id: str, tenant: str, attempt: int, finding: Finding) -> bool:
    t = schema.incident
    return (
        conn.execute(
            sa.select(t.c.id)
            .where(
                t.c.run_id == run_id,
                t.c.tenant == tenant,
                t.c.attempt == attempt,
                t.c.mode == finding.mode,
                t.c.status == "resolved",
                t.c.first_step <= finding.step,
            )
            .limit(1)
        ).first()
        is not None
    )


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
) -> _Open:
    words = explain(finding, sites)
    hit = _sites_of(finding)
    window = finding.step // max(window_steps, 1)
    identity = "\0".join([run_id, str(attempt), finding.mode, words.place["module"] or "", str(window)])
    row: dict[str, Any] = {
        "run_id": run_id,
        "tenant": tenant,
        "id": uuid.uuid4().hex,
        "attempt": attempt,
        "mode": finding.mode,
        "severity": finding.severity,
        "status": "open",
        "first_step": finding.step,
        "last_step": finding.step,
        "num_events": 1,
        "sites": hit[:MAX_SITES],
        "num_sites": max(len(hit), int(finding.extra.get("num_sites", 0))),
        "fingerprint": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        "opened_at": now,
        "resolved_at": None,
        "updated_at": now,
    }
    incident = _Open(row=row, flow=0, weight_born=False, origin_rank=finding.rank, num_events=0, change="opened")
    _place_at(incident, finding, words)
    incident.events.append(("opened", finding.step, _root(incident, finding)))
    return incident


def _place_at(incident: _Open, finding: Finding, words: Explanation) -> None:
    """Let the incident say what this finding says: it is the earliest that is known."""
    ranks = incident.row.get("place", {}).get("ranks", [])
    place = {**words.place, "ranks": sorted({*ranks, finding.rank})}
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
    )
    incident.flow = finding.rank_in_flow
    incident.weight_born = bool(finding.extra.get("weight_born", False)) and finding.mode in NONFINITE_MODES
    incident.origin_rank = finding.rank


def _root(incident: _Open, finding: Finding) -> dict[str, Any]:
    return {
        "flow": incident.flow,
        "weight_born": incident.weight_born,
        "rank": finding.rank,
        "mode": finding.mode,
        "title": incident.row["title"],
    }


def _absorb(incident: _Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> None:
    row = incident.row
    earlier = (finding.step, finding.rank_in_flow) < (row["first_step"], incident.flow)
    takes_over = earlier and not finding.extra.get("consequence")
    row["first_step"] = min(row["first_step"], finding.step)
    row["last_step"] = max(row["last_step"], finding.step)
    row["num_events"] += 1
    row["severity"] = max(row["severity"], finding.severity, key=_SEVERITY.index)
    hit = _sites_of(finding)
    if takes_over:
        old_mode = row["mode"]
        _place_at(incident, finding, explain(finding, sites))
        row["sites"] = list(dict.fromkeys([*hit, *row["sites"]]))[:MAX_SITES]
        incident.events.append(("updated", finding.step, {**_root(incident, finding), "earlier_cause_than": old_mode}))
        incident.change = incident.change or "rerooted"
    else:
        row["sites"] = list(dict.fromkeys([*row["sites"], *hit]))[:MAX_SITES]
        if finding.rank not in row["place"]["ranks"]:
            row["place"] = {**row["place"], "ranks": sorted({*row["place"]["ranks"], finding.rank})}
        incident.change = incident.change or "updated"
    grown = max(row["num_sites"], len(row["sites"]), int(finding.extra.get("num_sites", 0)))
    if grown >= 2 * row["num_sites"]:  # the spread is told in powers of two: a storm leaves a handful of events
        incident.events.append(("updated", finding.step, {"num_sites": grown}))
    row["num_sites"] = grown


def _write(conn: sa.Connection, incident: _Open, now: float, public_url: str) -> IncidentChange:
    row, t = incident.row, schema.incident
    row["updated_at"] = now
    opened = incident.change == "opened"
    if opened:
        conn.execute(sa.insert(t).values(**row))
    else:
        values = {k: v for k, v in row.items() if k not in ("run_id", "tenant", "id", "status", "opened_at")}
        conn.execute(sa.update(t).where(*key_of(t, row)).values(**values))
    for kind, step, detail in incident.events:
        incident.num_events += 1
        write_event(conn, row, incident.num_events, kind, now, step, detail)
    if opened:
        reason = write_firing(conn, row, now, public_url)
        if reason:
            write_event(conn, row, incident.num_events + 1, "updated", now, row["first_step"], {"message": reason})
    return change_of(row, incident.change or "updated")
