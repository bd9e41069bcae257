"""Steps that came when those behind them were judged, counted for each session: no statistic has seen them.

Shapes:     numbers of steps -> the counts of their sessions
Thread:     detect worker, in the transaction that marks the batches
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t

_s = t.session.c
_last = sa.bindparam("last", type_=sa.BigInteger)
_ADD = (
    sa.update(t.session)
    .where(
        _s.run_id == sa.bindparam("run"),
        _s.tenant == sa.bindparam("of_tenant"),
        _s.session == sa.bindparam("in_session"),
    )
    .values(
        num_late_steps=_s.num_late_steps + sa.bindparam("num", type_=sa.BigInteger),
        last_late_step=sa.case((_s.last_late_step > _last, _s.last_late_step), else_=_last),
    )
)


def add_late_steps(conn: Connection, run_id: str, tenant: str, late: Sequence[tuple[str, int, int]]) -> None:
    """Add (session, number of steps, the last of them). Each is added once: the caller's transaction marks the batches."""
    of_run = {"run": run_id, "of_tenant": tenant}
    rows = [{**of_run, "in_session": session, "num": num, "last": last} for session, num, last in sorted(late)]
    if rows:
        conn.execute(_ADD, rows)
