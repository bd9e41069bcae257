"""Batches without steps, sent for their health alone: they leave hot_batch as those whose steps are compacted do.

Shapes:     hot_batch rows without steps -> keys in the ledger
Thread:     compactor

Every session that ends in order sends one. Their health is in the row of the session.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store.compact import MAX_BATCHES, release


def let_go_stepless(engine: Engine, run_id: str, tenant: str, now: float, *, cool_after_s: float) -> int:
    """Delete those of a run that the detectors have seen, once they are as old as a batch that is compacted however few its steps are.

    Returns:
        How many.

    Raises:
        CellChanged: somebody else did.
    """
    b = t.hot_batch.c
    names = ("run_id", "tenant", "session", "rank", "seq", "arrival", "body_sha256")
    which = (b.run_id == run_id, b.tenant == tenant, b.step_min.is_(None), b.detected != t.BATCH_PENDING)
    query = sa.select(*(b[n] for n in names)).where(*which, b.received_at <= now - cool_after_s).limit(MAX_BATCHES)
    with engine.connect() as conn:
        rows = conn.execute(query).all()
    if rows:
        with writing(engine) as conn:
            release(conn, run_id, tenant, rows)
    return len(rows)
