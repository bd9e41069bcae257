"""States of an incident as people use them: what its status is, who has looked at it, and as what it was closed.

Shapes:     a row of incident -> one of STATES; the same as conditions in SQL
Thread:     any; pure functions

`status` (open, acknowledged, resolved) is what the detectors and the messages go by. A failure may be over before anybody
has seen it: then it is resolved, and still asks for somebody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema as t

OPEN, ACKNOWLEDGED, UNSEEN, SEEN, FIXED, FALSE_ALARM = "open", "acknowledged", "unseen", "seen", "fixed", "false-alarm"
STATES = (OPEN, ACKNOWLEDGED, UNSEEN, SEEN, FIXED, FALSE_ALARM)
ASKS_TO_BE_SEEN = ("critical", "warning")
"""A notice that is over asks nobody."""


def state_of(incident: Mapping[str, Any]) -> str:
    """One of STATES."""
    if incident["status"] != "resolved":
        return ACKNOWLEDGED if incident["status"] == "acknowledged" else OPEN
    if incident["closed_as"]:
        return str(incident["closed_as"])
    return UNSEEN if incident["seen_at"] is None and incident["severity"] in ASKS_TO_BE_SEEN else SEEN


def unseen() -> sa.ColumnElement[bool]:
    """Resolved, and nobody has seen it."""
    c = t.incident.c
    return sa.and_(c.status == "resolved", c.seen_at.is_(None), c.closed_as.is_(None), c.severity.in_(ASKS_TO_BE_SEEN))


def asks() -> sa.ColumnElement[bool]:
    """Somebody should look: open and not taken by anybody, or over and not seen."""
    c = t.incident.c
    return sa.or_(sa.and_(c.status == "open", c.severity.in_(ASKS_TO_BE_SEEN)), unseen())


def over() -> sa.ColumnElement[bool]:
    """Resolved, and it asks for nobody."""
    return sa.and_(t.incident.c.status == "resolved", sa.not_(unseen()))


def in_order() -> tuple[sa.ColumnElement[Any], ...]:
    """What asks for somebody, what is open, what is looked after, what is over; severe before mild."""
    c = t.incident.c
    state = sa.case((asks(), 0), (c.status == "open", 1), (c.status == "acknowledged", 2), else_=3)
    severity = sa.case(*((c.severity == name, k) for k, name in enumerate(("critical", "warning", "info"))), else_=9)
    return state, severity


def is_in(state: str) -> sa.ColumnElement[bool]:
    """The condition of one of STATES."""
    c = t.incident.c
    if state in (OPEN, ACKNOWLEDGED):
        return c.status == state
    if state == UNSEEN:
        return unseen()
    if state == SEEN:
        return sa.and_(c.status == "resolved", c.closed_as.is_(None), sa.not_(unseen()))
    return sa.and_(c.status == "resolved", c.closed_as == state)
