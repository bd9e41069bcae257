"""Who has a message in hand: making it out of rows, leasing it, and taking back what the dead had leased.

Shapes:     rows of outbox -> Leased
Thread:     dispatcher, inside a write transaction

A message is its leading row. What goes with it is written into that row's payload when it is leased for the first time,
so that every further try sends the same notices under the same key; the other rows are `grouped` until it is settled.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.db.fence import unfenced
from fp8watch_server.incidents.payload import AlsoPayload, Incident, MessagePayload, Told
from fp8watch_server.notify.channels.base import Channel
from fp8watch_server.notify.fanout import drop_untold, hold_inhibited
from fp8watch_server.notify.group import Pick, Row, choose, same_incident
from fp8watch_server.notify.message import SUMMARY

MAX_RETRY_AFTER_S = 3600.0
MAX_OPEN = 32
ALIVE: set[str] = set()
"""Names of the dispatchers of this process that may hold leases."""


class Raced(Exception):
    """Another collector took one of the rows first; the transaction must be undone."""


@dataclass(frozen=True)
class Leased:
    """One message in hand."""

    run_id: str
    tenant: str
    id: str
    kind: str  # firing | resolved | summary
    idempotency_key: str
    payload: MessagePayload
    num_attempts: int  # this one included
    created_at: float

    @property
    def others(self) -> list[list[str]]:
        """[run id, tenant, row id] of the rows that go with it."""
        return self.payload.get("with", [])


def lease(conn: sa.Connection, channel: Channel, holder: str, now: float, lease_s: float) -> Leased | None:
    """Take the next message that is due on a channel: one that must be tried again, or a new one.

    Raises:
        Raced: undo the transaction.
    """
    again = _due_again(conn, channel.name, now)
    if again is not None:
        row, num_attempts, made = again
    else:
        drop_untold(conn, channel.name)
        hold_inhibited(conn, channel.name)
        pick = choose(conn, channel, now)
        if not pick.rows:
            return None
        row, num_attempts = pick.rows[0], 0
        made = {"kind": pick.kind, "payload": _put_together(conn, channel.name, pick)}
        for other in pick.rows[1:]:
            _take(conn, other, {"state": "grouped"})
    leased = {"state": "leased", "leased_by": holder, "leased_until": now + lease_s, "num_attempts": num_attempts + 1}
    _take(conn, row, {**made, **leased}, due_again(now) if again is not None else None)
    return Leased(
        run_id=row.run_id,
        tenant=row.tenant,
        id=row.id,
        kind=str(made["kind"]),
        idempotency_key=row.idempotency_key,
        payload=made["payload"],
        num_attempts=num_attempts + 1,
        created_at=row.created_at,
    )


def _due_again(conn: sa.Connection, channel: str, now: float) -> tuple[Row, int, dict[str, Any]] | None:
    t = schema.outbox
    due = (t.c.channel == channel, due_again(now), unfenced(t.c.run_id))
    query = sa.select(t).where(*due).order_by(t.c.created_at).limit(1)
    got = conn.execute(query.with_for_update(skip_locked=True)).mappings().first()
    if got is None:
        return None
    row = Row(**{name: got[name] for name in Row.__dataclass_fields__})
    return row, got["num_attempts"], {"kind": row.kind, "payload": got["payload"]}


def _take(conn: sa.Connection, row: Row, values: dict[str, Any], still: sa.ColumnElement[bool] | None = None) -> None:
    t = schema.outbox
    still = sa.and_(t.c.state == "pending", t.c.num_attempts == 0) if still is None else still
    key = (t.c.run_id == row.run_id, t.c.tenant == row.tenant, t.c.id == row.id)
    if conn.execute(sa.update(t).where(*key, still).values(**values)).rowcount != 1:
        raise Raced


def _put_together(conn: sa.Connection, channel: str, pick: Pick) -> MessagePayload:
    """The payload of a message."""
    lead, *others = pick.rows
    payload: MessagePayload = {**lead.payload, **_told(conn, channel, lead)}
    if pick.kind == SUMMARY:
        payload["lead_kind"] = lead.kind
    if others:
        payload["also"] = [
            cast(AlsoPayload, {**row.payload, **_told(conn, channel, row), "kind": row.kind}) for row in others
        ]
        payload["with"] = [[row.run_id, row.tenant, row.id] for row in others]
    if pick.kind != SUMMARY and (still_open := _open(conn, channel, pick.rows)):
        payload["open"] = still_open
    return payload


def _told(conn: sa.Connection, channel: str, row: Row) -> Told:
    """The incident as its firing told it: it may have another severity, cause or place by now."""
    if row.kind != "resolved":
        return {}
    t = schema.outbox.c
    told = conn.execute(
        sa.select(t.payload)
        .where(t.run_id == row.run_id, t.tenant == row.tenant, t.incident_id == row.incident_id)
        .where(t.channel == channel, t.kind == "firing", t.state == "sent")
        .order_by(t.created_at.desc())
        .limit(1)
    ).scalar()
    return {"told": told["incident"]} if told else {}


def _open(conn: sa.Connection, channel: str, rows: Sequence[Row]) -> list[Incident]:
    """What the channel was told of the run before and is not over: receivers take a group as a whole."""
    t, over = schema.outbox.c, schema.outbox.alias("over").c
    ended = sa.exists().where(*same_incident(over, t), over.kind == "resolved")
    told = conn.execute(
        sa.select(t.payload)
        .where(t.run_id == rows[0].run_id, t.tenant == rows[0].tenant, t.channel == channel)
        .where(t.kind == "firing", t.state == "sent", t.incident_id.not_in([r.incident_id for r in rows]), ~ended)
        .order_by(t.created_at.desc())
    ).scalars()
    found: dict[str, Incident] = {}
    for payload in told:
        incident = payload.get("incident", {})
        found.setdefault(incident.get("id", ""), incident)  # of one that was told twice, as it was told last
        if len(found) == MAX_OPEN:
            break
    return list(found.values())


def due_again(now: float) -> sa.ColumnElement[bool]:
    """Tried before and its time has come, or leased by somebody who did not come back.

    None waits for longer than MAX_RETRY_AFTER_S: a time that lies further ahead was written by a clock that has been
    set back since.
    """
    t = schema.outbox.c
    wait_is_over = sa.or_(t.next_attempt_at <= now, t.next_attempt_at > now + MAX_RETRY_AFTER_S)
    return sa.or_(
        sa.and_(t.state == "pending", t.num_attempts > 0, wait_is_over),
        sa.and_(t.state == "leased", t.leased_until <= now),
    )


def release_leases_of_the_dead(conn: sa.Connection) -> None:
    """What a process of this machine that is gone had in hand may be sent again, at once."""
    t = schema.outbox
    holders = conn.execute(sa.select(t.c.leased_by).where(t.c.state == "leased").distinct()).scalars()
    dead = [h for h in holders if h and _is_dead(h)]
    if dead:
        conn.execute(sa.update(t).where(t.c.leased_by.in_(dead), unfenced(t.c.run_id)).values(leased_until=0.0))


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
