"""After a restart an engine is built up again from what was looked at before.

Upstream:   fp8watch_server.worker    Downstream: fp8watch_server.detect.engine, fp8watch_server.store.hot
Shapes:     hot_batch rows that are detected -> one Engine, whose findings are known already and are dropped
Thread:     detect worker

How far back it looks is counted in sampled steps: steps with records. A run that sends full statistics each 64th step
needs 64 times the steps to fill the same baselines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import Site
from fp8watch_agent.wire import Batch

from .store import hot
from .store import schema as t

REPLAY_SAMPLES = 256
"""Sampled steps of a rank that are replayed."""
MAX_REPLAY_BATCHES = 8192
"""Of a rank, however few samples they hold."""


class Observes(Protocol):
    """The part of an engine that is needed here."""

    def observe(self, batch: Batch) -> Any:
        """Findings of one batch."""
        ...


def replay(conn: Connection, engine: Observes, run_id: str, tenant: str, before_arrival: int) -> int:
    """Build the baselines up again from the newest batches of each rank that were looked at before.

    Newest are those of its newest session: after a restart from an earlier step the old ones hold higher steps.

    Returns:
        How many batches were replayed.
    """
    b = t.hot_batch.c
    seen = (b.run_id == run_id, b.tenant == tenant, b.detected == t.BATCH_DETECTED, b.arrival < before_arrival)
    rows = conn.execute(
        sa.select(b.session, b.rank).where(*seen).group_by(b.rank, b.session, b.attempt).order_by(b.attempt)
    ).all()
    newest = {row.rank: row.session for row in rows}  # the last attempt stays
    arrivals: set[int] = set()
    for rank, session in newest.items():
        arrivals |= set(_newest_arrivals(conn, (*seen, b.rank == rank, b.session == session)))
    if not arrivals:
        return 0
    num = 0
    for row, batch in _load(conn, (*seen, b.arrival >= min(arrivals)), b.arrival):
        if row.arrival in arrivals:
            engine.observe(batch)
            num += 1
    return num


def _newest_arrivals(conn: Connection, where: tuple[Any, ...]) -> Iterator[int]:
    """Arrivals of one session's batches, newest first, until they hold enough samples."""
    b = t.hot_batch.c
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.received_at, b.arrival, b.num_records)
        .where(*where)
        .order_by(b.arrival.desc())
        .limit(MAX_REPLAY_BATCHES)
    ).all()
    num_samples = 0
    for row in rows:
        yield row.arrival
        if row.num_records:
            batch = hot.load(conn, row)
            num_samples += 0 if batch is None else len(np.unique(batch.step))
        if num_samples >= REPLAY_SAMPLES:
            return


def _load(conn: Connection, where: tuple[Any, ...], order: Any) -> Iterator[tuple[Any, Batch]]:
    b = t.hot_batch.c
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.received_at, b.arrival).where(*where).order_by(order)
    ).all()
    for row in rows:
        batch = hot.load(conn, row)
        if batch is not None:
            yield row, batch


def sites_version(conn: Connection, run_id: str, tenant: str) -> tuple[int, float]:
    """Number of sites and the sum of their times of change: whether to read them again."""
    c = t.site.c
    row = conn.execute(
        sa.select(sa.func.count(), sa.func.sum(c.updated_at)).where(c.run_id == run_id, c.tenant == tenant)
    ).one()
    return int(row[0]), float(row[1] or 0.0)


def sites_of(conn: Connection, run_id: str, tenant: str) -> list[Site]:
    """The sites of a run as the agent registered them."""
    c = t.site.c
    rows = conn.execute(sa.select(t.site).where(c.run_id == run_id, c.tenant == tenant))
    return [
        Site(
            id=row.site,
            module=row.module,
            operand=row.operand,
            direction=row.direction,
            gemm=row.gemm,
            order=row.flow_order,
            shape=(row.num_rows, row.num_columns),
            tile=(row.tile_rows, row.tile_columns),
            format=row.format,
            power_2_scale=row.power_2_scale,
            eps=row.eps,
            recipe=row.recipe,
            backend=row.backend,
            evidence=row.evidence,
        )
        for row in rows
    ]
