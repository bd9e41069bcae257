"""What people say of an incident: looked after, seen, over, fixed, a false alarm; whose it is; a comment.

Shapes:     a row of incident and an action -> the row after it, with its event
Thread:     query pool, inside one write transaction

    status        state          actions that lead there
    open          open
    acknowledged  acknowledged   ack
    resolved      unseen         by itself, after clean steps
                  seen           seen, resolve
                  fixed          fixed
                  false-alarm    false-alarm

An incident stays in the table whatever it is closed as: thresholds are learned from false alarms, and a cause that was
fixed and comes back has regressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.incidents.rows import key_of, num_events, write_event
from fp8watch_server.store.incident_states import FALSE_ALARM, FIXED

ACTIONS = ("ack", "seen", "resolve", FIXED, FALSE_ALARM)
_CLOSES = ("resolve", FIXED, FALSE_ALARM)
_CLOSED_AS = {FIXED: FIXED, FALSE_ALARM: FALSE_ALARM}
_EVENT = {"ack": "acknowledged", "resolve": "resolved", "seen": "seen", FIXED: FIXED, FALSE_ALARM: "false alarm"}


def act(conn: sa.Connection, row: Mapping[str, Any], action: str, now: float, *, by: str) -> dict[str, Any] | None:
    """Do one of ACTIONS; None where it changes nothing. A resolved incident stays resolved.

    Returns:
        The row as it is now. Where its status became resolved, the caller queues that message.
    """
    values: dict[str, Any] = {}
    if row["seen_at"] is None:
        values["seen_at"] = now
    if action == "ack":
        if row["status"] != "open":
            return None
        values["status"] = "acknowledged"
    elif action in _CLOSES and row["status"] != "resolved":
        values |= {"status": "resolved", "resolved_at": now}
    if action in (FIXED, FALSE_ALARM, "seen") and row["closed_as"] != _CLOSED_AS.get(action):
        values["closed_as"] = _CLOSED_AS.get(action)
    return _changed(conn, row, values, _EVENT[action], {"by": by}, now) if values else None


def assign(conn: sa.Connection, row: Mapping[str, Any], owner: str, now: float, *, by: str) -> dict[str, Any] | None:
    """Say whose it is; '' for nobody's. None where it is already."""
    if row["owner"] == owner:
        return None
    return _changed(conn, row, {"owner": owner}, "assigned", {"by": by, "owner": owner}, now)


def comment(conn: sa.Connection, row: Mapping[str, Any], text: str, now: float, *, by: str) -> dict[str, Any]:
    """Add what somebody found out. It is an event: nothing is lost when others write, too."""
    return _changed(conn, row, {}, "comment", {"by": by, "text": text}, now)


def _changed(
    conn: sa.Connection, row: Mapping[str, Any], values: dict[str, Any], kind: str, detail: dict[str, Any], now: float
) -> dict[str, Any]:
    values = {**values, "updated_at": now}
    conn.execute(sa.update(schema.incident).where(*key_of(schema.incident, row)).values(**values))
    write_event(conn, row, num_events(conn, row) + 1, kind, now, int(row["last_step"]), detail)
    return {**row, **values}
