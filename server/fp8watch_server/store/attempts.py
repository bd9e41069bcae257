"""Which attempt a step of a rank belongs to, where a run has computed steps again.

Shapes:     (rank, step, attempt) of rows of `scalar` -> which of them count
Thread:     query pool, compactor

Of a rank its newest attempt counts. A run may resume on fewer ranks: what those that it no longer has had computed of a step goes
when a newer attempt, in whose world they are not, has computed the step again.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t

Ints = npt.NDArray[np.int64]
Fewer = dict[tuple[int, int], list[int]]
"""(attempt, world size) -> ranks whose sessions say so, where the run has a rank outside of that world."""


def fewer_ranks(conn: Connection, run_id: str, tenant: str) -> Fewer:
    """The attempts that had fewer ranks than others; most often there is none."""
    s = t.session.c
    of_run = (s.run_id == run_id, s.tenant == tenant)
    highest = sa.select(sa.func.max(s.rank)).where(*of_run).scalar_subquery()
    out: Fewer = defaultdict(list)
    for attempt, world_size, rank in conn.execute(
        sa.select(s.attempt, s.world_size, s.rank).where(*of_run, s.world_size <= highest)
    ):
        out[attempt, world_size].append(rank)
    return out


def counting(fewer: Fewer, rank: Ints, step: Ints, attempt: Ints) -> npt.NDArray[np.bool_]:
    """Which rows do not belong to a rank that a newer attempt with this step no longer had. All ranks of a step are given."""
    out = np.ones(len(step), dtype=bool)
    for (newer, world_size), ranks in fewer.items():
        again = step[(attempt == newer) & np.isin(rank, ranks)]
        if len(again):
            out &= (rank < world_size) | (attempt >= newer) | ~np.isin(step, again)
    return out


def lowest_current(conn: Connection, run_id: str, tenant: str) -> int:
    """The lowest attempt that a rank of the newest start is in: where nothing counts the starts, a rank that missed one is behind."""
    s, later = t.session.c, t.session.alias().c
    of_run = (s.run_id == run_id, s.tenant == tenant)
    newest = sa.select(sa.func.max(s.attempt)).where(*of_run).scalar_subquery()
    began = conn.execute(sa.select(sa.func.min(s.registered_at)).where(*of_run, s.attempt == newest)).scalar()
    newer = sa.select(sa.literal(1)).where(
        later.run_id == s.run_id, later.tenant == s.tenant, later.rank == s.rank, later.attempt > s.attempt
    )
    there = (*of_run, s.last_seen_at >= (began or 0.0), ~newer.exists())
    return int(conn.execute(sa.select(sa.func.min(s.attempt)).where(*there)).scalar() or 1)


def owners(
    conn: Connection, run_id: str, tenant: str, from_step: int, to_step: int, *, apart: bool = False
) -> dict[tuple[int, int], int]:
    """{(rank, step): attempt that it belongs to, or a newer one}; of rank −1 the newest of any rank.

    Args:
        apart: what each rank computed last, also of one that a newer attempt no longer had.
    """
    c = t.scalar.c
    where = (c.run_id == run_id, c.tenant == tenant, c.step >= from_step, c.step <= to_step)
    rows = conn.execute(sa.select(c.rank, c.step, c.attempt).where(*where)).all()
    owner: dict[tuple[int, int], int] = {}
    for rank, step, attempt in rows:
        for key in ((rank, step), (t.ROLLED_RANK, step)):
            owner[key] = max(attempt, owner.get(key, 0))
    fewer = {} if apart or not rows else fewer_ranks(conn, run_id, tenant)
    if fewer:
        gone = ~counting(fewer, *np.array([tuple(row) for row in rows], dtype=np.int64).T)
        for i in np.flatnonzero(gone).tolist():
            rank, step, attempt = rows[i]
            if owner[rank, step] == attempt:
                owner[rank, step] = owner[t.ROLLED_RANK, step]
    return owner
