"""Who has a message in hand: fanning out, leasing, and taking back what the dead had leased.

Upstream:   fp8watch_server.incidents.messages    Downstream: fp8watch_server.notify.outbox
Shapes:     rows of outbox -> Leased
Thread:     dispatcher, inside a write transaction
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from fp8watch_server.store import schema

MAX_AGE_S = 24 * 3600.0
MAX_RETRY_AFTER_S = 3600.0
ALIVE: set[str] = set()
"""Names of the dispatchers of this process that may hold leases."""


@dataclass(frozen=True)
class Leased:
    """One message in hand."""

    run_id: str
    tenant: str
    id: str
    kind: str
    idempotency_key: str
    payload: dict[str, Any]
    num_attempts: int  # this one included
    created_at: float


def fan_out(conn: sa.Connection, channels: Sequence[str], now: float) -> None:
    """A row for everybody becomes one row per channel, so that each is retried alone."""
    t = schema.outbox
    for row in list(conn.execute(sa.select(t).where(t.c.channel == "", t.c.state == "pending")).mappings()):
        key = [t.c.run_id == row["run_id"], t.c.tenant == row["tenant"], t.c.id == row["id"]]
        if now - row["created_at"] > MAX_AGE_S:
            conn.execute(sa.update(t).where(*key).values(state="dead", last_error="older than a day"))
            continue
        first, *others = channels
        conn.execute(sa.update(t).where(*key).values(channel=first))
        for other in others:
            conn.execute(sa.insert(t).values(**{**row, "id": uuid.uuid4().hex, "channel": other}))


def lease(conn: sa.Connection, channel: str, holder: str, now: float, lease_s: float) -> Leased | None:
    """Take the next message that is due on a channel. A resolve waits until its firing is through."""
    t = schema.outbox
    earlier = t.alias("earlier")
    firing_waits = sa.exists().where(
        earlier.c.run_id == t.c.run_id,
        earlier.c.tenant == t.c.tenant,
        earlier.c.incident_id == t.c.incident_id,
        earlier.c.channel == t.c.channel,
        earlier.c.kind == "firing",
        earlier.c.state.in_(["pending", "leased"]),
    )
    row = (
        conn.execute(
            sa.select(t)
            .where(t.c.channel == channel, due(now), sa.or_(t.c.kind == "firing", ~firing_waits))
            .order_by(t.c.created_at)
            .limit(1)
        )
        .mappings()
        .first()
    )
    if row is None:
        return None
    taken = conn.execute(
        sa.update(t)
        .where(t.c.run_id == row["run_id"], t.c.tenant == row["tenant"], t.c.id == row["id"], due(now))
        .values(
            state="leased",
            leased_by=holder,
            leased_until=now + lease_s,
            num_attempts=row["num_attempts"] + 1,
        )
    )
    if taken.rowcount != 1:
        return None
    return Leased(
        run_id=row["run_id"],
        tenant=row["tenant"],
        id=row["id"],
        kind=row["kind"],
        idempotency_key=row["idempotency_key"],
        payload=row["payload"],
        num_attempts=row["num_attempts"] + 1,
        created_at=row["created_at"],
    )


def release_leases_of_the_dead(conn: sa.Connection) -> None:
    """What a process of this machine that is gone had in hand may be sent again, at once."""
    t = schema.outbox
    holders = conn.execute(sa.select(t.c.leased_by).where(t.c.state == "leased").distinct()).scalars()
    dead = [h for h in holders if h and _is_dead(h)]
    if dead:
        conn.execute(sa.update(t).where(t.c.leased_by.in_(dead)).values(leased_until=0.0))


def due(now: float) -> sa.ColumnElement[bool]:
    """Waiting and its time has come, or leased by somebody who did not come back.

    A first attempt waits for nothing, and none for longer than MAX_RETRY_AFTER_S: a time that lies further ahead was
    written by a clock that has been set back since.
    """
    t = schema.outbox
    wait_is_over = sa.or_(
        t.c.num_attempts == 0, t.c.next_attempt_at <= now, t.c.next_attempt_at > now + MAX_RETRY_AFTER_S
    )
    return sa.or_(
        sa.and_(t.c.state == "pending", wait_is_over),
        sa.and_(t.c.state == "leased", t.c.leased_until <= now),
    )


def _is_dead(holder: str) -> bool:
    """Whether a lease's holder was a process of this machine that is gone. Of other machines nothing is known."""
    host, _, rest = holder.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        return holder not in ALIVE  # in a container every process is number 1, the one before us too
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
