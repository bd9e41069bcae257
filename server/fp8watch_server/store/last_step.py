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


_c = t.scalar.c
_THERE = (
    _c.run_id == sa.bindparam("run"),
    _c.tenant == sa.bindparam("of_tenant"),
    _c.attempt == sa.bindparam("at_attempt"),
    _c.step == sa.bindparam("at_step"),
)
_SEQS = sa.select(_c.rank, _c.seq).where(*_THERE, _c.rank.in_(sa.bindparam("ranks", expanding=True)))
_NEWEST = sa.select(sa.func.max(_c.time)).where(*_THERE)


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
    there = {"run": run.run_id, "of_tenant": run.tenant, "at_attempt": attempt, "at_step": step}
    ranks = sorted({batch.rank for batch in behind})
    seq_at = {row.rank: row.seq for row in conn.execute(_SEQS, {**there, "ranks": ranks})}
    back = [batch for batch in behind if seq_at.get(batch.rank, batch.seq) < batch.seq]
    if not back:
        return attempt, step
    there_at = conn.execute(_NEWEST, there).scalar()
    now = [batch.step_max for batch in back if there_at is None or not batch.began_at < there_at]
    return attempt, max(now, default=step)
