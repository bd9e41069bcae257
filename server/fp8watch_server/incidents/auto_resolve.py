"""Automatic resolution of incidents after twenty clean steps, with their message; not of what a session says of itself, as long as it does.

Shapes:     the last step that every live rank has delivered -> rows of incident, incident_event, outbox
Thread:     detect worker, inside one write transaction
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.detect.finding import UNOBSERVED
from fp8watch_server.detect.sessions import BLIND_FACT
from fp8watch_server.incidents.messages import write_resolved
from fp8watch_server.incidents.rows import IncidentChange, change_of, key_of, num_events, write_event

CLOSE_AFTER_STEPS = 20


def close_quiet(
    conn: sa.Connection,
    run_id: str,
    tenant: str,
    attempt: int,
    current_step: int,
    now: float,
    after_clean_steps: int = CLOSE_AFTER_STEPS,
    stride: int = 1,
    public_url: str = "",
) -> list[IncidentChange]:
    """Resolve incidents without findings for `after_clean_steps` observed steps, with their message.

    Args:
        current_step: last step that every live rank has delivered (DetectionEngine.delivered_step).
        stride: steps between observed steps (Engine.stride).
    """
    t = schema.incident
    quiet = conn.execute(
        sa.select(t)
        .where(
            t.c.run_id == run_id,
            t.c.tenant == tenant,
            t.c.attempt <= attempt,
            t.c.status != "resolved",
            t.c.last_step <= current_step - after_clean_steps * stride,
        )
        .order_by(t.c.id)
        .with_for_update(key_share=True)
    )
    changes = []
    for got in list(quiet.mappings()):
        apart = max(stride, _stride(conn, dict(got)))
        if got["last_step"] > current_step - after_clean_steps * apart or _stands(conn, dict(got)):
            continue
        row = {**got, "status": "resolved", "resolved_at": now, "updated_at": now}
        still = (*key_of(t, row), t.c.status != "resolved")
        over = sa.update(t).where(*still).values(status="resolved", resolved_at=now, updated_at=now)
        if conn.execute(over).rowcount == 0:
            continue
        seq = num_events(conn, row) + 1
        write_event(
            conn, row, seq, "resolved", now, current_step, {"clean_steps": current_step - int(row["last_step"])}
        )
        write_resolved(conn, row, now, public_url)
        changes.append(change_of(row, "resolved"))
    return changes


def _stride(conn: sa.Connection, row: Mapping[str, Any]) -> int:
    """Steps between the samples of an incident's evidence."""
    e = schema.incident_event
    details = conn.execute(
        sa.select(e.c.detail).where(
            e.c.run_id == row["run_id"], e.c.tenant == row["tenant"], e.c.incident_id == row["id"]
        )
    ).scalars()
    return max((int(detail.get("stride", 1)) for detail in details), default=1)


def _stands(conn: sa.Connection, row: Mapping[str, Any]) -> bool:
    """Whether it is about what a session says of itself and goes on saying: that much of a model sends nothing is told once, and nothing
    more comes of it."""
    if row["mode"] != "recipe-mismatch" or _topic(conn, row) != UNOBSERVED:
        return False
    s = schema.session.c
    later = schema.session.alias().c
    newer = sa.select(sa.literal(1)).where(
        later.run_id == s.run_id, later.tenant == s.tenant, later.rank == s.rank, later.attempt > s.attempt
    )
    said: sa.ColumnElement[str] = sa.type_coerce(s.facts, sa.JSON)[BLIND_FACT].as_string()
    now = sa.select(sa.literal(1)).where(
        s.run_id == row["run_id"], s.tenant == row["tenant"], said != "", ~newer.exists()
    )
    return conn.execute(now.limit(1)).first() is not None


def _topic(conn: sa.Connection, row: Mapping[str, Any]) -> str:
    """Finding.topic of what an incident reports; of one that an earlier version opened its kind, which is of more than one topic."""
    e = schema.incident_event.c
    details = conn.execute(
        sa.select(e.detail)
        .where(e.run_id == row["run_id"], e.tenant == row["tenant"], e.incident_id == row["id"])
        .order_by(e.seq)
    ).scalars()
    root = [detail for detail in details if "flow" in detail][-1:]
    return str(root[0].get("topic", root[0].get("kind"))) if root else ""
