"""The delivery log: what became of each message, the dead letters above all.

Shapes:     rows of outbox -> {id, channel, state, ...}
Thread:     any
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema

STATES = {
    "pending": "waits, or is tried again",
    "leased": "is being sent",
    "grouped": "goes with another message that is being sent",
    "sent": "the receiver took it",
    "summarised": "told in a summary, past the channel's limit of the hour",
    "inhibited": "waits while a critical incident is open at the same place",
    "unrouted": "no route leads anywhere",
    "untold": "the end of what was never told",
    "dead": "refused, or given up after a day",
}
MAX_LIMIT = 1000


def delivery_log(
    conn: sa.Connection,
    *,
    state: str | None = None,
    channel: str | None = None,
    run_id: str | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Notices and what became of them, the newest first. Nothing of it is secret."""
    t = schema.outbox.c
    query = sa.select(schema.outbox).where(t.tenant == schema.DEFAULT_TENANT)
    for column, value in ((t.state, state), (t.channel, channel), (t.run_id, run_id)):
        if value is not None:
            query = query.where(column == value)
    rows = conn.execute(query.order_by(t.created_at.desc(), t.id).limit(min(limit, MAX_LIMIT))).mappings()
    return [_as_entry(row) for row in rows]


def _as_entry(row: sa.RowMapping) -> dict[str, Any]:
    payload = row["payload"] if isinstance(row["payload"], dict) else {}
    incident = payload.get("incident") or {}
    plain = ("id", "run_id", "incident_id", "channel", "kind", "state", "num_attempts", "last_error")
    times = ("created_at", "next_attempt_at", "sent_at")
    told = {name: incident.get(name) for name in ("mode", "severity", "title")}
    return {**{name: row[name] for name in (*plain, *times)}, **told}


def retry(conn: sa.Connection, *, id: str | None = None, channel: str | None = None) -> int:
    """Send dead letters again: one, those of a channel, or all. Returns how many those are."""
    t = schema.outbox
    query = sa.update(t).where(t.c.tenant == schema.DEFAULT_TENANT, t.c.state == "dead", t.c.channel != "")
    if id is not None:
        query = query.where(t.c.id == id)
    if channel is not None:
        query = query.where(t.c.channel == channel)
    again = {"state": "pending", "num_attempts": 0, "next_attempt_at": 0.0, "created_at": time.time()}
    return int(conn.execute(query.values(**again)).rowcount)
