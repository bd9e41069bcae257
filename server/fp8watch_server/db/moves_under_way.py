"""Moves of runs between databases that are not finished, and whether anybody is at work on them.

Shapes:     the home database -> one row for each move
Thread:     any

Who moves a run holds an advisory lock of the home database. A move that was cut short goes on only when it is started again;
its run may be refused until then.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

_UNDER_WAY = sa.text(
    """
    SELECT d.run_id, d.shard, d.moving_to, d.moved_from, d.refuses, EXISTS (
        SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('fp8watch move ' || d.run_id, 0)) AS at_work
    FROM shard_of_run d WHERE d.moving_to IS NOT NULL OR d.moved_from IS NOT NULL ORDER BY d.run_id
    """
)


@dataclass(frozen=True)
class UnderWay:
    """A move that is not finished.

    Args:
        run_id: the run.
        to: name of the database that it moves to; "": home.
        arrived: whether it lies there by now, and only its old copy is to be deleted.
        refuses: whether its batches are refused meanwhile.
        at_work: whether a process is at work on it; else it was cut short.
    """

    run_id: str
    to: str
    arrived: bool
    refuses: bool
    at_work: bool


def lock_key(run_id: str) -> sa.ColumnElement[int]:
    """Key of the lock of whoever moves a run."""
    return sa.func.hashtextextended(f"fp8watch move {run_id}", 0)


def moves_under_way(home: Connection) -> list[UnderWay]:
    """All of them; runs move between PostgreSQL servers only."""
    if home.dialect.name != "postgresql":
        return []
    return [
        UnderWay(
            row.run_id,
            row.shard if row.moving_to is None else row.moving_to,
            arrived=row.moving_to is None,
            refuses=row.refuses,
            at_work=row.at_work,
        )
        for row in home.execute(_UNDER_WAY)
    ]
