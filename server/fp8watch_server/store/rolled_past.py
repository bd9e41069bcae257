"""What is left of attempts whose detail has gone, under a newer attempt that computes their steps again.

Shapes:     a row of `cell` -> the newest attempt in its roll-up; the key of that roll-up as one more source
Thread:     any

Where detail has gone, the source [attempt, −1] of a cell names the newest attempt that its roll-up (or summary) was made of:
records of these attempts are late, and join it. A newer attempt replaces it step by step. Its first batch makes a source
like any other of the roll-up, of that same key, and the cell has detail again.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t


def mark_of(sources: list[list[int]]) -> list[int] | None:
    """The source that names the newest of some sources' attempts; None: there are none."""
    return [max(attempt for attempt, _ in sources), t.ROLLED_RANK] if sources else None


def past_of(cell: Any) -> int:
    """Newest attempt of a cell whose detail has gone, 0 where none has, or where an earlier collector let it go."""
    return max((attempt for attempt, rank in cell.sources if rank == t.ROLLED_RANK), default=0)


def newest_past(conn: Connection, run_id: str, tenant: str, cell: Any) -> int:
    """As `past_of`; where an earlier collector let detail go, attempts that began before the cell was written last."""
    named = past_of(cell)
    if named or cell.kept == t.KEPT_DETAIL:
        return named
    s = t.session.c
    before = (s.run_id == run_id, s.tenant == tenant, s.registered_at <= cell.compacted_at)
    return int(conn.execute(sa.select(sa.func.max(s.attempt)).where(*before)).scalar() or 1)
