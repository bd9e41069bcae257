"""Steps of an incident that a later attempt computed again: what is read of them is no longer what the incident was found in.

Shapes:     an incident -> Again, or None
Thread:     query pool
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t

MAX_ATTEMPTS = 64
"""So many attempts after that of the incident are looked at."""


@dataclass(frozen=True)
class Again:
    """From which step on, and in which attempts."""

    found_in: int
    """Attempt of the incident."""
    first_step: int
    attempts: tuple[int, ...]

    def words(self) -> str:
        """What whoever looks at these steps must know."""
        which = ", ".join(str(k) for k in self.attempts)
        attempts = f"attempt{'' if len(self.attempts) == 1 else 's'} {which}"
        return (
            f"Steps from {self.first_step} on were computed again in {attempts}: charts and the flight recorder show "
            f"these, not the steps of attempt {self.found_in}, in which this was found."
        )


def done_again(conn: Connection, incident: Mapping[str, Any]) -> Again | None:
    """Where a later attempt has steps of an incident or before it, on the first rank that it names."""
    c, r = t.scalar.c, t.run.c
    found_in, rank = int(incident["attempt"]), (incident["place"]["ranks"] or [0])[0]
    of_run = sa.select(r.attempt).where(r.run_id == incident["run_id"], r.tenant == t.DEFAULT_TENANT)
    newest = int(conn.execute(of_run).scalar() or 0)
    later = list(range(found_in + 1, min(newest, found_in + MAX_ATTEMPTS) + 1))
    if not later:
        return None
    rows = conn.execute(
        sa.select(c.attempt, sa.func.min(c.step))
        .where(c.run_id == incident["run_id"], c.tenant == t.DEFAULT_TENANT)
        .where(c.attempt.in_(later), c.rank == rank, c.step <= incident["last_step"])
        .group_by(c.attempt)
        .order_by(c.attempt)
    ).all()
    return Again(found_in, min(int(step) for _, step in rows), tuple(int(k) for k, _ in rows)) if rows else None
