"""Who is told: a notice for everybody becomes one row per channel that its routes lead to.

Shapes:     rows of outbox
Thread:     dispatcher, inside a write transaction

A resolve goes where its firing went, and nowhere else. What is about a run that is being moved waits, and nothing waits for it. What nobody is told keeps a row that says why, in its state:

    unrouted    no route leads anywhere
    inhibited   a critical incident is open at the same place; it is told when that one is over and this one is not
    untold      a resolve of what was never told
    dead        older than a day
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from fp8watch_server.db import schema
from fp8watch_server.db.fence import unfenced
from fp8watch_server.incidents.inhibit import inhibitor
from fp8watch_server.notify.group import UNDERWAY, same_incident

MAX_AGE_S = 24 * 3600.0
TOLD = (*UNDERWAY, "sent")

Route = Callable[[Mapping[str, Any]], Sequence[str]]
"""The names of the channels that a payload goes to."""


def waits_for_all(conn: sa.Connection) -> bool:
    """Whether there is anything to fan out."""
    t = schema.outbox.c
    waits = (t.channel == "", t.state == "pending", unfenced(t.run_id))
    return conn.execute(sa.select(t.id).where(*waits).limit(1)).first() is not None


def fan_out(conn: sa.Connection, route: Route, now: float) -> None:
    """A row for everybody becomes one row per channel, so that each is retried alone. One that cannot is dead, and no other waits
    for it."""
    t = schema.outbox
    rows = conn.execute(
        sa.select(t)
        .where(t.c.channel == "", t.c.state == "pending", unfenced(t.c.run_id))
        .order_by(t.c.kind, t.c.created_at)  # a firing before its resolve, also after a clock was set back
        .with_for_update(skip_locked=True)
    )
    for row in list(rows.mappings()):
        key = [t.c.run_id == row["run_id"], t.c.tenant == row["tenant"], t.c.id == row["id"]]
        if now - row["created_at"] > MAX_AGE_S:
            conn.execute(sa.update(t).where(*key).values(state="dead", last_error="older than a day"))
            continue
        if row["kind"] != "firing" and _is_fanned_out_elsewhere(conn, row):
            continue
        channels = route(row["payload"]) if row["kind"] == "firing" else _told(conn, row)
        if not channels:
            state = "unrouted" if row["kind"] == "firing" else "untold"
            conn.execute(sa.update(t).where(*key).values(state=state))
            continue
        try:
            with conn.begin_nested():
                conn.execute(sa.update(t).where(*key).values(channel=channels[0]))
                for other in channels[1:]:
                    conn.execute(sa.insert(t).values(**{**row, "id": uuid.uuid4().hex, "channel": other}))
        except IntegrityError:
            conn.execute(sa.update(t).where(*key).values(state="dead", last_error="a channel has this notice already"))


def _is_fanned_out_elsewhere(conn: sa.Connection, row: sa.RowMapping) -> bool:
    """Whether the firing of a resolve is still for everybody, though firings come first: somebody else has it in a transaction of
    their own, and where it goes is known behind that."""
    t = schema.outbox.c
    waits = (t.incident_id == row["incident_id"], t.kind == "firing", t.channel == "", t.state == "pending")
    of_run = (t.run_id == row["run_id"], t.tenant == row["tenant"])
    return conn.execute(sa.select(t.id).where(*of_run, *waits).limit(1)).first() is not None


def _told(conn: sa.Connection, row: sa.RowMapping) -> list[str]:
    t = schema.outbox.c
    firing = (t.incident_id == row["incident_id"], t.kind == "firing", t.channel != "", t.state.in_(TOLD))
    of_run = (t.run_id == row["run_id"], t.tenant == row["tenant"])
    return sorted(conn.execute(sa.select(t.channel).where(*of_run, *firing).distinct()).scalars())


def drop_untold(conn: sa.Connection, channel: str) -> None:
    """Resolves whose firing did not get through in the end: dead, or told in a summary only."""
    t, firing = schema.outbox, schema.outbox.alias("firing").c
    told = sa.exists().where(*same_incident(firing, t.c), firing.kind == "firing", firing.state.in_(TOLD))
    conn.execute(
        sa.update(t)
        .where(t.c.channel == channel, t.c.kind == "resolved", t.c.state == "pending", t.c.num_attempts == 0)
        .where(unfenced(t.c.run_id), ~told)
        .values(state="untold")
    )


def hold_inhibited(conn: sa.Connection, channel: str) -> None:
    """Warnings that a critical incident of the same run and place has overtaken."""
    t = schema.outbox
    fresh = (t.c.channel == channel, t.c.kind == "firing", t.c.state == "pending", t.c.num_attempts == 0)
    found = sa.select(t.c.run_id, t.c.tenant, t.c.id, t.c.payload).where(*fresh, unfenced(t.c.run_id))
    rows = conn.execute(found.limit(256))
    for run_id, tenant, row_id, payload in list(rows):
        incident = payload.get("incident") if isinstance(payload, dict) else None
        by = inhibitor(conn, run_id, tenant, incident) if isinstance(incident, dict) else None
        if by is not None:
            conn.execute(
                sa.update(t)
                .where(t.c.run_id == run_id, t.c.tenant == tenant, t.c.id == row_id)
                .values(state="inhibited", last_error=f"inhibited by {by}")
            )


def give_up_strangers(conn: sa.Connection, channels: Sequence[str], now: float) -> int:
    """What waits for a channel that is not there any more is dead after a day. Returns how many still wait."""
    t = schema.outbox
    strange = (t.c.state == "pending", t.c.channel.not_in(["", *channels]))
    dead = {"state": "dead", "last_error": "its channel is not configured any more"}
    old = (t.c.created_at < now - MAX_AGE_S, unfenced(t.c.run_id))
    conn.execute(sa.update(t).where(*strange, *old).values(**dead))
    return int(conn.execute(sa.select(sa.func.count()).select_from(t).where(*strange)).scalar_one())
