"""Inhibition: an open critical incident holds back messages of warnings at the same place of the same attempt of a run.

Shapes:     an incident -> the id of the one that says more, or None
Thread:     detect worker and dispatcher, inside a write transaction

The notice of an inhibited incident stays in the outbox, as `inhibited`. When the critical one is resolved and the other
is still open, it is sent after all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema


def inhibitor(conn: sa.Connection, run_id: str, tenant: str, incident: Mapping[str, Any]) -> str | None:
    """The open critical incident of the same run, attempt and module; None when there is none, or this one is critical."""
    if incident.get("severity") == "critical" or "place" not in incident:
        return None
    t = schema.incident.c
    critical = conn.execute(
        sa.select(t.id, t.place)
        .where(
            t.run_id == run_id,
            t.tenant == tenant,
            t.attempt == incident.get("attempt"),  # one that has ended breaks nothing any more
            t.severity == "critical",
            t.status != "resolved",
        )
        .order_by(t.opened_at)
    )
    module = incident["place"].get("module")
    return next((str(i) for i, place in critical if i != incident.get("id") and place.get("module") == module), None)


def release(conn: sa.Connection, row: Mapping[str, Any], now: float) -> None:
    """After a critical incident is resolved: send the notices that it inhibited and that are still open, as if just
    begun.
    """
    if row["severity"] != "critical":
        return
    i, o = schema.incident.c, schema.outbox
    of_run = (o.c.run_id == row["run_id"], o.c.tenant == row["tenant"])
    held = conn.execute(
        sa.select(o.c.id, i.id.label("incident_id"), i.attempt, i.severity, i.place)
        .join_from(
            o,
            schema.incident,
            sa.and_(i.run_id == o.c.run_id, i.tenant == o.c.tenant, i.id == o.c.incident_id),
        )
        .where(*of_run, o.c.state == "inhibited", i.status != "resolved", i.severity != "critical")
    )
    for got in list(held):
        incident = {"id": got.incident_id, "attempt": got.attempt, "severity": got.severity, "place": got.place}
        if inhibitor(conn, row["run_id"], row["tenant"], incident) is None:
            conn.execute(
                sa.update(o).where(*of_run, o.c.id == got.id).values(state="pending", last_error=None, created_at=now)
            )
