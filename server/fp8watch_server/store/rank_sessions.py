"""The newest session of each rank of a job, those first whose agent needs a look.

Shapes:     a run -> OfRanks: sessions of some ranks, and counts over all of them
Thread:     query pool

A run may have thousands of ranks: the database says which of them need a look, and those that are well are only counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.queries import STALLED_AFTER_S

MAX_UNWELL, MAX_WELL = 256, 32
MANY_LATE_STEPS = 64
"""Of a rank: fewer are said, and are no reason to look."""


@dataclass(frozen=True)
class OfRanks:
    """The ranks of a job."""

    sessions: Sequence[Mapping[str, Any]]
    """Their newest ones {rank, attempt, host, ended, last_seen_at, health, versions, num_late_steps, last_late_step}, those that need a look first."""
    num_ranks: int
    """Ranks that came."""
    num_unread: int = 0
    """Ranks that need a look besides those of `sessions`."""


def of_ranks(conn: Connection, run: Mapping[str, Any], now: float | None = None) -> OfRanks:
    """Ranks that came since the newest attempt began, and such of before that are silent since.

    What ended before that has not come again; a rank that the job no longer has, after a restart with fewer, is not silent.

    Args:
        run: as queries.run gives it; id and world_size are read.
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    s, later = t.session.c, t.session.alias().c
    of_run = (s.run_id == run["id"], s.tenant == t.DEFAULT_TENANT)
    newest = conn.execute(sa.select(sa.func.max(s.attempt)).where(*of_run)).scalar()
    if newest is None:
        return OfRanks((), 0)
    began = conn.execute(sa.select(sa.func.min(s.registered_at)).where(*of_run, s.attempt == newest)).scalar_one()
    newer = sa.select(sa.literal(1)).where(
        later.run_id == s.run_id, later.tenant == s.tenant, later.rank == s.rank, later.attempt > s.attempt
    )
    gone = sa.and_(s.last_seen_at < began, sa.or_(s.ended, s.rank >= int(run["world_size"] or 1)))
    there = (*of_run, ~newer.exists(), ~gone)
    unwell = _unwell(now)
    num_ranks, num_unwell = conn.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(sa.case((unwell, 1), else_=0)), 0)).where(*there)
    ).one()
    told = sa.select(
        s.rank, s.attempt, s.host, s.ended, s.last_seen_at, s.health, s.versions, s.num_late_steps, s.last_late_step
    ).order_by(s.rank)
    some = [*conn.execute(told.where(*there, unwell).limit(MAX_UNWELL)).mappings()]
    num_unread = int(num_unwell) - len(some)
    some += conn.execute(told.where(*there, ~unwell).limit(MAX_WELL)).mappings()
    return OfRanks(some, int(num_ranks), num_unread)


def _unwell(now: float) -> sa.ColumnElement[bool]:
    """What pages.coverage says of a session that is not well; agents send no counts of drops that are 0."""
    c = t.session.c
    health = sa.type_coerce(c.health, sa.JSON())
    counts = [sa.func.coalesce(health[name].as_float(), 0.0) != 0 for name in ("internal_errors", "spooled")]
    dropped = sa.func.coalesce(sa.cast(c.health, sa.Text), "").like('%"dropped\\_%', escape="\\")
    return sa.or_(
        sa.and_(~c.ended, c.last_seen_at < now - STALLED_AFTER_S), dropped, c.num_late_steps >= MANY_LATE_STEPS, *counts
    )
