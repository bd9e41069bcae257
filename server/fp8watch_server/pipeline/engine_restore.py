"""Restores a run's detector engine after a restart, from saved state or by replaying recent batches.

Shapes:     batches that were detected -> one Engine, whose findings are known already and are dropped
Thread:     detect worker

An engine that can dump its state is saved from time to time and needs only later batches: that is exact. Otherwise the
newest batches are replayed. The amount is counted in steps with records, because quantities that only samples measure
have fewer of them to learn from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import sqlalchemy as sa
import zstandard
from sqlalchemy.engine import Connection

from fp8watch_agent.record import Site
from fp8watch_agent.wire import Batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.store import history, hot_batches

log = logging.getLogger("fp8watch.detect")

STATE_VERSION = "1"
"""Version of the envelope; the engine's dump has its own."""
REPLAY_SAMPLES = 256
"""Number of steps with records that are replayed per rank."""
MAX_REPLAY_BATCHES = 8192
"""Limit per rank, however few samples the batches hold."""


class Observes(Protocol):
    """The part of an engine that is needed here."""

    def observe(self, batch: Batch, at: float | None = None) -> Any:
        """Findings of one batch."""
        ...


@dataclass(frozen=True)
class Saved:
    """Engine state after a batch."""

    arrival: int
    state: bytes


Registered = tuple[int, float, int, int]
"""Numbers of sites and sessions, with what changes when one of them says more of itself: whether to read them again."""


def replay(
    conn: Connection,
    engine: Observes,
    run_id: str,
    tenant: str,
    before_arrival: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Rebuild the baselines from the newest processed batches of each rank.

    Newest means those of its newest session: after a restart from an earlier step the old sessions hold higher steps.
    Compacted batches are read from blocks. `meanwhile` is called before each batch.

    Returns:
        How many batches were replayed.
    """
    b, s = t.hot_batch.c, t.session.c
    seen = (b.run_id == run_id, b.tenant == tenant, b.detected == t.BATCH_DETECTED, b.arrival < before_arrival)
    rows = conn.execute(
        sa.select(s.session, s.rank, s.attempt).where(s.run_id == run_id, s.tenant == tenant).order_by(s.attempt)
    ).all()
    newest = {row.rank: row for row in rows}  # the last attempt wins
    arrivals: set[int] = set()
    from_step: dict[history.Source, int | None] = {}
    known = history.cells(conn, run_id, tenant)
    for rank, row in newest.items():
        meanwhile()
        found = _newest_arrivals(conn, (*seen, b.rank == rank, b.session == row.session))
        arrivals |= set(found.arrivals)
        source = (row.attempt, rank)
        from_step[source] = _first_block(conn, run_id, tenant, source, known, REPLAY_SAMPLES - found.num_samples)
    where = (*seen, b.arrival >= min(arrivals, default=before_arrival))
    num = 0
    for old in history.batches(conn, run_id, tenant, where=where, from_step=from_step.get):
        if old.arrival is None or old.arrival in arrivals:
            meanwhile()
            engine.observe(old.batch, at=old.at)
            num += 1
    return num


def _first_block(
    conn: Connection, run_id: str, tenant: str, source: history.Source, cells: Sequence[Any], num_samples: int
) -> int | None:
    """First step of the blocks that hold `num_samples` samples of a source; None: no block is needed, or there is none."""
    first = None
    for cell in reversed(cells):
        if num_samples <= 0:
            break
        if list(source) in cell.sources:
            num_samples -= history.num_samples(conn, run_id, tenant, source, cell.step0)
            first = cell.step0
    return first


@dataclass(frozen=True)
class _Newest:
    """Hot batches of a session, and the number of samples in them."""

    arrivals: list[int]
    num_samples: int


def _newest_arrivals(conn: Connection, where: tuple[Any, ...]) -> _Newest:
    """Arrivals of one session's batches, newest first, until they hold enough samples."""
    b = t.hot_batch.c
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.received_at, b.arrival, b.num_records)
        .where(*where)
        .order_by(b.arrival.desc())
        .limit(MAX_REPLAY_BATCHES)
    ).all()
    arrivals: list[int] = []
    num_samples = 0
    for row in rows:
        arrivals.append(row.arrival)
        if row.num_records:
            batch = hot_batches.load(conn, row)
            num_samples += 0 if batch is None else len(np.unique(batch.step))
        if num_samples >= REPLAY_SAMPLES:
            break
    return _Newest(arrivals, num_samples)


def _load(conn: Connection, where: tuple[Any, ...], order: Any) -> Iterator[tuple[Any, Batch]]:
    b = t.hot_batch.c
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.received_at, b.arrival).where(*where).order_by(order)
    ).all()
    for row in rows:
        batch = hot_batches.load(conn, row)
        if batch is not None:
            yield row, batch


def save(conn: Connection, engine: Any, run_id: str, tenant: str, arrival: int, now: float) -> bool:
    """Save the engine's state, if it can be dumped.

    A dump that fails costs no batch. The state of before goes: batches since are compacted in time, and it cannot be told how many are
    missing; a restart rebuilds from the newest samples instead.

    Returns:
        Whether there was no such failure.
    """
    dump = getattr(engine, "dump", None)
    if dump is None:
        return True
    try:
        state = zstandard.ZstdCompressor(level=1).compress(dump())
    except Exception:
        log.exception("run %r: what its detectors remember cannot be saved; a restart rebuilds it", run_id)
        c = t.detect_state.c
        conn.execute(sa.delete(t.detect_state).where(c.run_id == run_id, c.tenant == tenant))
        return False
    row = {"run_id": run_id, "tenant": tenant, "arrival": arrival, "version": STATE_VERSION, "state": state}
    upsert(conn, t.detect_state, [{**row, "written_at": now}])
    return True


def saved(conn: Connection, run_id: str, tenant: str, before_arrival: int) -> Saved | None:
    """Saved state, unless it is newer than `before_arrival`."""
    c = t.detect_state.c
    where = (c.run_id == run_id, c.tenant == tenant, c.version == STATE_VERSION, c.arrival < before_arrival)
    row = conn.execute(sa.select(c.arrival, c.state).where(*where)).first()
    if row is None:
        return None
    try:
        return Saved(row.arrival, zstandard.ZstdDecompressor().decompress(bytes(row.state)))
    except zstandard.ZstdError:
        return None


def replay_since(
    conn: Connection,
    engine: Observes,
    run_id: str,
    tenant: str,
    after_arrival: int,
    before_arrival: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Replay batches that were processed after the engine was saved. Returns the number of batches."""
    b = t.hot_batch.c
    where = (b.run_id == run_id, b.tenant == tenant, b.detected == t.BATCH_DETECTED)
    num = 0
    for row, batch in _load(conn, (*where, b.arrival > after_arrival, b.arrival < before_arrival), b.arrival):
        meanwhile()
        engine.observe(batch, at=row.received_at)
        num += 1
    return num


def registered_sites(conn: Connection, run_id: str, tenant: str) -> tuple[int, float]:
    """Fingerprint of the sites of a run."""
    c = t.site.c
    query = sa.select(sa.func.count(), sa.func.sum(c.updated_at)).where(c.run_id == run_id, c.tenant == tenant)
    row = conn.execute(query).one()
    return int(row[0]), float(row[1] or 0.0)


def registered_sessions(conn: Connection, run_id: str, tenant: str) -> tuple[int, int]:
    """Fingerprint of the sessions of a run. It reads all of them."""
    s = t.session.c
    size = sa.func.sum(sa.func.length(sa.cast(s.facts, sa.Text)))
    row = conn.execute(sa.select(sa.func.count(), size).where(s.run_id == run_id, s.tenant == tenant)).one()
    return int(row[0]), int(row[1] or 0)


def sessions_of(conn: Connection, run_id: str, tenant: str, only: set[str] | None = None) -> Sequence[Any]:
    """Session rows of a run; `only`: those of these names."""
    s = t.session.c
    where = [s.run_id == run_id, s.tenant == tenant]
    if only is not None:
        where.append(s.session.in_(sorted(only)))
    return conn.execute(sa.select(t.session).where(*where).order_by(s.attempt, s.rank)).all()


def run_name(conn: Connection, run_id: str, tenant: str) -> str:
    """Display name of a run."""
    r = t.run.c
    return str(conn.execute(sa.select(r.name).where(r.run_id == run_id, r.tenant == tenant)).scalar() or "")


def newest_attempt(conn: Connection, run_id: str, tenant: str) -> int:
    """Newest attempt of any rank."""
    r = t.run.c
    return int(conn.execute(sa.select(r.attempt).where(r.run_id == run_id, r.tenant == tenant)).scalar() or 1)


def sites_of(conn: Connection, run_id: str, tenant: str) -> list[Site]:
    """Sites of a run as registered."""
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
