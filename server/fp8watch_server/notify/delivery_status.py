"""What became of a message, written to its rows.

Shapes:     Leased, outcome -> rows of outbox
Thread:     dispatcher, inside a write transaction
"""

from __future__ import annotations

from typing import Any, cast

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.db.fence import unfenced
from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.message import SUMMARY
from fp8watch_server.notify.outbox_lease import Leased

_MADE = ("also", "with", "open", "told", "lead_kind")


def record_outcome(
    conn: sa.Connection, leased: Leased, holder: str, state: str, error: str | None, now: float, wait_s: float
) -> None:
    """Write the outcome of an attempt.

    Args:
        holder: who had leased it; where somebody else has taken it over, nothing is written.
        state: sent, dead, pending (again after `wait_s`), or apart: each of its notices goes alone.
    """
    values: dict[str, Any] = {"last_error": error, "leased_by": None, "leased_until": None}
    values |= {"state": state, "next_attempt_at": now + wait_s, "sent_at": now if state == "sent" else None}
    if state == "apart":
        values |= {"state": "pending", "num_attempts": 0, "kind": leased.payload.get("lead_kind", leased.kind)}
        values["payload"] = _alone(leased.payload)
    t = schema.outbox
    if _update(conn, [leased.run_id, leased.tenant, leased.id], t.c.leased_by == holder, values) != 1:
        return
    for key in leased.others:
        grouped = sa.and_(t.c.state == "grouped", unfenced(t.c.run_id))  # of another run in a summary
        if state == "sent":
            told = "summarised" if leased.kind == SUMMARY else "sent"
            _update(conn, key, grouped, {"state": told, "sent_at": now})
        elif state == "dead":
            _update(conn, key, grouped, {"state": "dead", "last_error": error})
        elif state == "apart":
            of_row = (t.c.run_id == key[0], t.c.tenant == key[1], t.c.id == key[2])
            payload = conn.execute(sa.select(t.c.payload).where(*of_row)).scalar_one()
            _update(conn, key, grouped, {"state": "pending", "payload": _alone(payload)})


def _update(conn: sa.Connection, key: list[str], still: sa.ColumnElement[bool], values: dict[str, Any]) -> int:
    t = schema.outbox
    of_row = (t.c.run_id == key[0], t.c.tenant == key[1], t.c.id == key[2])
    return int(conn.execute(sa.update(t).where(*of_row, still).values(**values)).rowcount)


def _alone(payload: MessagePayload) -> MessagePayload:
    return cast(MessagePayload, {**{k: v for k, v in payload.items() if k not in _MADE}, "alone": True})
