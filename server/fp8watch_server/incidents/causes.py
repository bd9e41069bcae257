"""Causes: incidents of one failure mode at one kind of place are one cause, in whichever run they open.

Shapes:     a mode and a place -> an id of 16 hex digits; a new row of incident -> the same with what people said before
Thread:     detect worker, inside one write transaction

Layers are alike, so their numbers are left out: `layers.2.mlp.down_proj` and `layers.5.mlp.down_proj` are one place. The
recipe is no part of it, because changing it is the usual remedy: a failure that comes back under another one is no new
cause.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.store.incident_states import FIXED

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(module: str | None) -> str:
    """A module's name with `*` for each part that is a number; '' for the whole run."""
    return _NUMBER.sub("*", module or "")


def cause_id(mode: str, place: Mapping[str, Any]) -> str:
    """The cause of an incident with this mode at this place."""
    name = "\0".join([mode, pattern_of(place.get("module")), place.get("operand") or ""])
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def remember(conn: sa.Connection, row: dict[str, Any]) -> None:
    """Give a new incident what people said of its cause: its owner, and that it was fixed, so that it regressed.

    A cause that was fixed, and was marked otherwise since, has not regressed.
    """
    c = schema.incident.c
    same = (c.tenant == row["tenant"], c.cause_id == row["cause_id"], c.id != row["id"])
    owner = conn.execute(sa.select(c.owner).where(*same, c.owner != "").order_by(c.opened_at.desc()).limit(1)).scalar()
    marked = conn.execute(
        sa.select(c.id, c.closed_as).where(*same, c.closed_as.is_not(None)).order_by(c.opened_at.desc()).limit(1)
    ).first()
    row["owner"] = owner or ""
    row["regression_of"] = marked.id if marked is not None and marked.closed_as == FIXED else None
