"""Queue of batches that the detectors have not processed, and marking them as done.

Shapes:     hot_batch rows, without their bodies
Thread:     detect worker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t

BATCHES_AT_ONCE = 512

Run = tuple[str, str]  # run id, tenant


class Overtaken(Exception):
    """Another collector has marked a batch first: two collectors took it."""


def pending(conn: Connection, of_run: Run | None = None) -> Sequence[Any]:
    """The next batches: runs by their oldest batch, and within a run in order of commit.

    The order within a run is not by clock, which may be set back.

    Args:
        of_run: only those of this run.
    """
    b = t.hot_batch.c
    rows = sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.attempt, b.arrival, b.received_at)
    rows = rows.where(b.detected == t.BATCH_PENDING).limit(BATCHES_AT_ONCE)
    if of_run is not None:
        these = rows.where(b.run_id == of_run[0], b.tenant == of_run[1])
        return conn.execute(these.order_by(b.arrival)).all()
    waiting = (
        sa.select(b.run_id, b.tenant, sa.func.min(b.received_at).label("since"))
        .where(b.detected == t.BATCH_PENDING)
        .group_by(b.run_id, b.tenant)
        .subquery("waiting")
    )
    joined = rows.join(waiting, sa.and_(b.run_id == waiting.c.run_id, b.tenant == waiting.c.tenant))
    return conn.execute(joined.order_by(waiting.c.since, b.run_id, b.tenant, b.arrival)).all()


def waiting_runs(conn: Connection) -> Sequence[Run]:
    """Runs of which any batch waits."""
    b = t.hot_batch.c
    rows = conn.execute(sa.select(b.run_id, b.tenant).where(b.detected == t.BATCH_PENDING).distinct())
    return [(row.run_id, row.tenant) for row in rows]


def urgent_runs(conn: Connection) -> Sequence[Run]:
    """Runs in which a batch waits that is to be taken first, by the oldest of them, however much waits before it."""
    b = t.hot_batch.c
    of_runs = sa.select(b.run_id, b.tenant).where(b.detected == t.BATCH_PENDING, b.urgent)
    rows = conn.execute(
        of_runs.group_by(b.run_id, b.tenant).order_by(sa.func.min(b.received_at)).limit(BATCHES_AT_ONCE)
    )
    return [(row.run_id, row.tenant) for row in rows]


def mark(conn: Connection, run: Run, arrivals: list[int], state: int, error: str | None) -> None:
    """Mark batches as processed.

    Raises:
        Overtaken: one of them has been marked by somebody else.
    """
    b = t.hot_batch.c
    these = (b.run_id == run[0], b.tenant == run[1], b.arrival.in_(arrivals), b.detected == t.BATCH_PENDING)
    done = conn.execute(sa.update(t.hot_batch).where(*these).values(detected=state, detect_error=error))
    if done.rowcount != len(arrivals):
        raise Overtaken
