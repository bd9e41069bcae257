"""Incident messages: outbox rows for opened, escalated, re-judged and resolved incidents.

Upstream:   fp8watch_server.incidents.fold
Downstream: fp8watch_server.notify.outbox (table outbox)
Shapes:     a row of incident -> payload.NoticePayload
Thread:     detect worker, inside the transaction that changes the incident

The row is committed together with the change, so a message is never lost and never sent for a change that was rolled
back.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.incidents.inhibit import inhibitor, release
from fp8watch_server.incidents.payload import Incident, NoticePayload
from fp8watch_server.incidents.silences import silences_of
from fp8watch_server.store.rows import IncidentFields

FLAPPING_MESSAGES = 2
"""Firing messages per run, mode and module, or logged scalar, that are no less grave, within FLAPPING_S; what comes after is on the pages only."""
FLAPPING_S = 3600.0
_SEVERITIES = ("info", "warning", "critical")


def contract_incident(row: Mapping[str, Any], public_url: str) -> Incident:
    """The public form of an incident; without a public URL its links are paths."""
    base = public_url.rstrip("/")
    links = {"url": f"{base}/incidents/{row['id']}", "runbook_url": f"{base}/runbooks/{row['mode']}"}
    return cast(Incident, {**{name: row[name] for name in IncidentFields.__annotations__}, **links})


def write_firing(conn: sa.Connection, row: Mapping[str, Any], now: float, public_url: str) -> str | None:
    """Queue the message of a new incident. Returns why none was queued, or None."""
    if silence := _silenced_by(conn, row, now):
        return f"silenced by {silence}"
    before = _fired_before(conn, row, now)
    if before >= FLAPPING_MESSAGES:
        same = "scalar" if row["mode"] == "scalar-shift" else "mode and module"
        return f"held back: {before} of the same {same} within {FLAPPING_S / 60:g} minutes"
    note = ""
    if before == FLAPPING_MESSAGES - 1:
        note = f"It comes and goes: more of the same within {FLAPPING_S / 60:g} minutes are on the pages only."
    by = inhibitor(conn, row["run_id"], row["tenant"], row)
    _write(conn, row, "firing", now, public_url, note, state="inhibited" if by else "pending")
    return f"waits while critical incident {by} is open at the same place" if by else None


def write_escalated(
    conn: sa.Connection, row: Mapping[str, Any], now: float, public_url: str, was: str = "warning"
) -> str | None:
    """Queue the message of an incident that became critical, or more than information, after its first message. Returns why none was queued, or
    None.
    """
    if silence := _silenced_by(conn, row, now):
        return f"silenced by {silence}"
    first = "information" if was == "info" else f"a {was}"
    note = f"It was {first} and is {'critical' if row['severity'] == 'critical' else 'a warning'} now."
    _write(conn, row, "firing", now, public_url, note, key=row["severity"], was_severity=was)
    return None


def write_rejudged(conn: sa.Connection, row: Mapping[str, Any], now: float, public_url: str, was: str) -> str | None:
    """Queue one message for an incident whose mode changed after its first message. Returns why none was queued, or
    None.

    Without a first message there is no second; a notice that is still inhibited is updated in place.
    """
    if silence := _silenced_by(conn, row, now):
        return f"silenced by {silence}"
    t = schema.outbox
    of_incident = (t.c.run_id == row["run_id"], t.c.tenant == row["tenant"], t.c.incident_id == row["id"])
    fired = list(
        conn.execute(
            sa.select(t.c.id, t.c.state, t.c.payload, t.c.idempotency_key).where(*of_incident, t.c.kind == "firing")
        )
    )
    waiting = [got for got in fired if got.state == "inhibited"]
    for got in waiting:
        payload = {**got.payload, "incident": contract_incident(row, public_url)}
        conn.execute(
            sa.update(t).where(t.c.run_id == row["run_id"], t.c.tenant == row["tenant"], t.c.id == got.id)
            .values(payload=payload)
        )  # fmt: skip
    key = "rejudged"
    if len(waiting) == len(fired):
        return "it waits, and says so when it goes out" if waiting else "it was not told before"
    if any(got.idempotency_key.endswith(f":{key}") for got in fired):
        return "another judgement was told before"
    note = f"It was told as {was}; what was measured since says {row['mode']}."
    _write(conn, row, "firing", now, public_url, note, key=key)
    return None


def write_resolved(conn: sa.Connection, row: Mapping[str, Any], now: float, public_url: str) -> None:
    """Queue the message of a resolved incident if its firing was queued, and release what it inhibited."""
    release(conn, row, now)
    t = schema.outbox
    fired = conn.execute(
        sa.select(t.c.id).where(
            t.c.run_id == row["run_id"],
            t.c.tenant == row["tenant"],
            t.c.incident_id == row["id"],
            t.c.kind == "firing",
            t.c.state != "inhibited",
        )
    ).first()
    if fired is not None:
        _write(conn, row, "resolved", now, public_url, "")


def _silenced_by(conn: sa.Connection, row: Mapping[str, Any], now: float) -> str | None:
    module = row["place"].get("module") or ""
    found = silences_of(conn, row["tenant"], row["run_id"], row["mode"], module, now)
    return str(found[0]["id"]) if found else None


def _fired_before(conn: sa.Connection, row: Mapping[str, Any], now: float) -> int:
    """Incidents of the last hour that were told of, are about the same, and no less grave."""
    i, o = schema.incident, schema.outbox
    rows = conn.execute(
        sa.select(i.c.id, i.c.place)
        .join(
            o,
            sa.and_(
                o.c.run_id == i.c.run_id,
                o.c.tenant == i.c.tenant,
                o.c.incident_id == i.c.id,
                o.c.kind == "firing",
                o.c.state != "inhibited",
            ),
        )
        .where(
            i.c.run_id == row["run_id"],
            i.c.tenant == row["tenant"],
            i.c.mode == row["mode"],
            i.c.severity.in_(_SEVERITIES[_SEVERITIES.index(row["severity"]) :]),
            i.c.opened_at > now - FLAPPING_S,
            i.c.id != row["id"],
        )
    )
    module = row["place"].get("module")
    same = {str(id) for id, place in rows if place.get("module") == module}
    return len(
        _of_its_matter(conn, row, same, "scalar" if row["mode"] == "scalar-shift" else "topic") if same else same
    )


def _of_its_matter(conn: sa.Connection, row: Mapping[str, Any], others: set[str], name: str) -> set[str]:
    """Those of the other incidents that tell of what this one tells of, or of which that is not known.

    Args:
        name: scalar | topic: what says so in their events. Names are the places of logged scalars.
    """
    e = schema.incident_event
    told: dict[str, set[str]] = {}
    for incident_id, detail in conn.execute(
        sa.select(e.c.incident_id, e.c.detail).where(
            e.c.run_id == row["run_id"], e.c.tenant == row["tenant"], e.c.incident_id.in_([*others, row["id"]])
        )
    ):
        if (matter := detail.get(name)) is not None:
            told.setdefault(str(incident_id), set()).add(matter)
    mine = told.get(row["id"])
    unknown = mine if name == "topic" else set()  # what an earlier version opened
    return {other for other in others if mine is None or mine & told.get(other, unknown or set())}


def _write(
    conn: sa.Connection,
    row: Mapping[str, Any],
    kind: str,
    now: float,
    public_url: str,
    note: str,
    key: str = "",
    state: str = "pending",
    was_severity: str = "",
) -> None:
    incident = contract_incident(row, public_url)
    if was_severity:
        incident["was_severity"] = was_severity
    queue(conn, row["tenant"], incident, kind, now, note=note, key=key, state=state)


def queue(
    conn: sa.Connection,
    tenant: str,
    incident: Incident,
    kind: str,
    now: float,
    *,
    note: str = "",
    key: str = "",
    state: str = "pending",
) -> None:
    """Insert a notice into the outbox.

    Args:
        kind: firing | resolved.
        key: tells two notices of one incident and kind apart.
        state: inhibited: it waits until that is over.
    """
    r, run_id = schema.run, incident["run_id"]
    name = conn.execute(sa.select(r.c.name).where(r.c.run_id == run_id, r.c.tenant == tenant)).scalar()
    payload: NoticePayload = {
        "incident": incident,
        "run": {"id": run_id, "name": name or run_id},
        "note": note,
    }
    conn.execute(
        sa.insert(schema.outbox).values(
            run_id=run_id,
            tenant=tenant,
            id=uuid.uuid4().hex,
            incident_id=incident["id"],
            kind=kind,
            idempotency_key=":".join(filter(None, (incident["id"], kind, key))),
            payload=payload,
            state=state,
            next_attempt_at=now,
            created_at=now,
        )
    )
