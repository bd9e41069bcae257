"""Which notices go out together, and when: one message per run and channel, and a summary past the hour's limit.

Shapes:     rows of outbox that were never tried -> Pick
Thread:     dispatcher; reads only

As in Alertmanager, the first notice of a run waits for company (group_wait_s), and the next message about the same run
comes group_interval_s later; a critical incident does not wait for that. Past max_per_hour what comes is held, and told
as one summary over all runs, at most every SUMMARY_EVERY_S. A resolve waits until its firing is through. A time further
ahead than AHEAD_S was written by a clock that has been set back since: it delays nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.db.fence import unfenced
from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels.base import Channel
from fp8watch_server.notify.message import SUMMARY, order_of

SUMMARY_EVERY_S = 300.0
HOUR_S = 3600.0
AHEAD_S = 2.0
"""What was written while the dispatcher looked, or by another machine whose clock is a little ahead, is new."""
MAX_TOGETHER = 256
UNDERWAY = ("pending", "leased", "grouped")


@dataclass(frozen=True)
class Row:
    """A notice that waits on a channel."""

    run_id: str
    tenant: str
    id: str
    incident_id: str
    kind: str
    idempotency_key: str
    payload: MessagePayload
    created_at: float

    @property
    def urgency(self) -> tuple[bool, int, float]:
        """Sorts to the front what must be seen first; what cannot be read, to the end."""
        try:
            return order_of(self.kind, self.payload["incident"])
        except (KeyError, TypeError, ValueError):
            return (True, 1, self.created_at)

    @property
    def is_critical(self) -> bool:
        """Whether it is the beginning of a critical incident."""
        incident = self.payload.get("incident")
        return self.kind == "firing" and bool(incident) and incident.get("severity") == "critical"


@dataclass(frozen=True)
class Pick:
    """The next message of a channel, its leading row first; without rows, how long there is nothing to do."""

    rows: tuple[Row, ...] = ()
    kind: str = ""
    wait_s: float = math.inf


def choose(conn: sa.Connection, channel: Channel, now: float) -> Pick:
    """The next message that is due on a channel among what was never tried."""
    rows = _fresh(conn, channel.name)
    if not rows:
        return Pick()
    pace = channel.pace
    if pace.max_per_hour and _num_sent(conn, channel.name, now) >= pace.max_per_hour:
        wait_s = _left(SUMMARY_EVERY_S, _last_sent(conn, channel.name, kind=SUMMARY), now)
        if wait_s > 0:
            return Pick(wait_s=wait_s)
        return Pick(tuple(sorted(rows, key=lambda r: r.urgency)), SUMMARY)
    groups: dict[tuple[str, str], list[Row]] = {}
    if alone := [row for row in rows if row.payload.get("alone")]:
        row = min(alone, key=lambda r: r.urgency)
        return Pick((row,), row.kind)
    for row in rows:
        groups.setdefault((row.run_id, row.tenant), []).append(row)
    soonest = math.inf
    for key, group in groups.items():
        wait_s = _left(pace.group_wait_s, group[0].created_at, now)
        if not any(row.is_critical for row in group):
            wait_s = max(wait_s, _left(pace.group_interval_s, _last_sent(conn, channel.name, of=key), now))
        if wait_s <= 0:
            together = tuple(sorted(group, key=lambda r: r.urgency))
            return Pick(together, together[0].kind)
        soonest = min(soonest, wait_s)
    return Pick(wait_s=soonest)


def _left(seconds: float, since: float | None, now: float) -> float:
    """What is left of a time that began then."""
    if since is None or now - since < -AHEAD_S:
        return 0.0
    return max(0.0, seconds - max(0.0, now - since))


def _fresh(conn: sa.Connection, channel: str) -> list[Row]:
    t = schema.outbox.c
    earlier = schema.outbox.alias("earlier").c
    firing_waits = sa.exists().where(*same_incident(earlier, t), earlier.kind == "firing", earlier.state.in_(UNDERWAY))
    got = conn.execute(
        sa.select(t.run_id, t.tenant, t.id, t.incident_id, t.kind, t.idempotency_key, t.payload, t.created_at)
        .where(t.channel == channel, t.state == "pending", t.num_attempts == 0, unfenced(t.run_id))
        .where(sa.or_(t.kind == "firing", ~firing_waits))
        .order_by(t.created_at, t.kind, t.id)
        .limit(MAX_TOGETHER)
    )
    return [Row(**row._mapping) for row in got]


def same_incident(a: Any, b: Any) -> list[sa.ColumnElement[bool]]:
    """Two rows of one incident on one channel."""
    return [a.run_id == b.run_id, a.tenant == b.tenant, a.incident_id == b.incident_id, a.channel == b.channel]


def _num_sent(conn: sa.Connection, channel: str, now: float) -> int:
    """Messages of the last hour. What went with another one was never tried by itself."""
    t = schema.outbox.c
    recent = t.sent_at.between(now - HOUR_S, now)
    query = sa.select(sa.func.count()).where(t.channel == channel, t.state == "sent", t.num_attempts > 0, recent)
    return int(conn.execute(query).scalar_one())


def _last_sent(
    conn: sa.Connection, channel: str, *, of: tuple[str, str] | None = None, kind: str | None = None
) -> float | None:
    t = schema.outbox.c
    query = sa.select(sa.func.max(t.sent_at)).where(t.channel == channel, t.state == "sent")
    if of is not None:
        query = query.where(t.run_id == of[0], t.tenant == of[1])
    if kind is not None:
        query = query.where(t.kind == kind)
    found = conn.execute(query).scalar()
    return None if found is None else float(found)
