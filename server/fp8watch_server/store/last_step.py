"""The step that a run is at: the highest of its newest attempt, or, where training went back in place, the one it is at now.

Shapes:     steps that batches tell of -> (attempt, step)
Thread:     committer

A trainer that loads a checkpoint in the same process computes lower steps under the same attempt. A rank that is behind others
is none such: it was never at the highest step, or it was there in a batch after this one. Ranks go back one after the other, so
one that did is believed only where no rank was at the highest step after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t


@dataclass(frozen=True)
class Told:
    """The steps of a batch that is stored."""

    attempt: int
    rank: int
    seq: int
    """Of its whole batch."""
    step_max: int
    began_at: float
    """When its first step ended, by the clock of training; NaN: unknown."""


def now_at(conn: Connection, run: Any, told: Sequence[Told]) -> tuple[int, int | None]:
    """(attempt, step) after some batches, whose scalars are written already.

    Args:
        run: its row before them.
    """
    attempt, step = run.last_step_attempt, run.last_step
    for batch in told:
        if step is None or (batch.attempt, batch.step_max) > (attempt, step):
            attempt, step = batch.attempt, batch.step_max
    behind = [batch for batch in told if batch.attempt == attempt and batch.step_max < step]
    if not behind:
        return attempt, step
    c = t.scalar.c
    there = (c.run_id == run.run_id, c.tenant == run.tenant, c.attempt == attempt, c.step == step)
    ranks = sorted({batch.rank for batch in behind})
    seq_at = {row.rank: row.seq for row in conn.execute(sa.select(c.rank, c.seq).where(*there, c.rank.in_(ranks)))}
    back = [batch for batch in behind if seq_at.get(batch.rank, batch.seq) < batch.seq]
    if not back:
        return attempt, step
    there_at = conn.execute(sa.select(sa.func.max(c.time)).where(*there)).scalar()
    now = [batch.step_max for batch in back if there_at is None or not batch.began_at < there_at]
    return attempt, max(now, default=step)
