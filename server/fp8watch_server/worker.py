"""The detect worker: every committed batch is looked at once, in the order in which it was committed.

Upstream:   fp8watch_server.ingest    Downstream: fp8watch_server.detect.engine, fp8watch_server.incidents.fold, fp8watch_server.store.totals
Shapes:     hot_batch rows that are pending -> findings -> incidents, in one transaction with the mark
Thread:     its own

A batch is marked in the transaction that writes its incidents, so a crash loses nothing and repeats nothing. After a
restart an engine is built up again from the newest batches, whose findings are known already and are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fp8watch_agent.record import Site
from fp8watch_agent.wire import Batch, WireError

from .store import hot
from .store import schema as t
from .store.dialect import writing
from .store.totals import add_totals

log = logging.getLogger("fp8watch.detect")

MAX_ENGINES = 64
REPLAY_STEPS = 256
"""How far back an engine looks when it is built up again."""
BATCHES_AT_ONCE = 32
IDLE_S = 1.0
RETRY_S = 0.5


class DetectEngine(Protocol):
    """One run's detectors: pure, no database."""

    def observe(self, batch: Batch) -> Sequence[Any]:
        """Findings of one batch."""
        ...

    def add_sites(self, sites: Any) -> None:
        """Facts that came later, or changed."""
        ...

    @property
    def settled_step(self) -> int | None:
        """The last step that every live rank has delivered."""
        ...

    @property
    def stride(self) -> int:
        """Steps between observed steps."""
        ...


@dataclass(frozen=True)
class Detection:
    """The rooms after this one, as plain callables."""

    make_facts: Callable[[Any], Mapping[int, Any]]  # of a list of record.Site
    make_engine: Callable[[Mapping[int, Any]], DetectEngine]
    fold: Callable[..., Sequence[Any]]
    close_quiet: Callable[..., Any]
    say_resolved: Callable[[Connection, Mapping[str, Any], float, str], None]
    """Queue the message of an incident that a person has resolved: (connection, row, now, public URL)."""


@dataclass
class _Running:
    engine: DetectEngine
    sites: Mapping[int, Any]
    sites_at: tuple[int, float]  # number of sites and the sum of their times of change: whether to read them again


class DetectWorker:
    """Takes pending batches until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        detection: Detection,
        *,
        public_url: str = "",
        clock: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = engine
        self._detection = detection
        self._public_url = public_url
        self._clock = clock
        self._on_change = on_change
        self._running: OrderedDict[tuple[str, str], _Running] = OrderedDict()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_failed_batches = 0

    def start(self) -> None:
        """Start the thread. What was pending when the collector last stopped is taken first."""
        self._thread = threading.Thread(target=self._loop, name="fp8watch-detect", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something new."""
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the batch in hand and end."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                if self.drain() == 0:
                    self._wake.wait(IDLE_S)
            except SQLAlchemyError as e:
                log.warning("detection waits for the database: %s", str(e).splitlines()[0])
                self._running.clear()  # an engine may have seen what was not committed
                self._stop.wait(RETRY_S)
            except Exception:
                log.exception("detection failed; trying again")
                self._running.clear()
                self._stop.wait(RETRY_S)

    def drain(self) -> int:
        """Take what is pending now; returns how many batches that was."""
        with self._db.connect() as conn:
            pending = _pending(conn)
        for row in pending:
            if self._stop.is_set():
                break
            self._take(row)
        return len(pending)

    def _take(self, row: Any) -> None:
        key = (row.run_id, row.tenant)
        try:
            with self._db.connect() as conn:
                batch = hot.load(conn, row)
        except WireError as e:  # damaged on the disk, or of a newer version: those behind it must not wait for it
            log.error("batch %s of run %r cannot be read (%s); going on without it", row.seq, row.run_id, e)
            self.num_failed_batches += 1
            self._mark(row, t.BATCH_FAILED, f"{type(e).__name__}: {e}"[:2000])
            return
        if batch is None:
            return
        state, error = t.BATCH_DETECTED, None
        findings: Sequence[Any] = ()
        running = self._engine_of(key, row.arrival)
        try:
            findings = running.engine.observe(batch)
        except Exception as e:
            log.exception("detectors failed on batch %s of run %r; going on without it", row.seq, row.run_id)
            self.num_failed_batches += 1
            state, error = t.BATCH_FAILED, f"{type(e).__name__}: {e}"[:2000]
            self._running.pop(key, None)
        try:
            changed = self._commit(row, batch, findings, running, state, error)
        except (OperationalError, InterfaceError, PoolTimeoutError):
            raise  # the database: later
        except Exception as e:
            log.exception("no incident could be made of batch %s of run %r; going on without it", row.seq, row.run_id)
            self.num_failed_batches += 1
            self._running.pop(key, None)
            changed = self._commit(row, batch, (), None, t.BATCH_FAILED, f"{type(e).__name__}: {e}"[:2000])
        if changed:
            self._on_change()

    def _commit(
        self, row: Any, batch: Batch, findings: Sequence[Any], running: _Running | None, state: int, error: str | None
    ) -> bool:
        with writing(self._db) as conn:
            changed = running is not None and self._write_incidents(conn, row, findings, running)
            add_totals(conn, batch, row.attempt, row.tenant)
            _mark(conn, row, state, error)
        return changed

    def _mark(self, row: Any, state: int, error: str) -> None:
        with writing(self._db) as conn:
            _mark(conn, row, state, error)

    def _write_incidents(self, conn: Connection, row: Any, findings: Sequence[Any], running: _Running) -> bool:
        now, where = self._clock(), (row.run_id, row.tenant, row.attempt)
        changed = False
        if findings:
            opened = self._detection.fold(
                conn, *where, findings, running.sites, now, window_steps=6, public_url=self._public_url
            )
            changed = bool(opened)
        settled = running.engine.settled_step
        if settled is not None:
            closed = self._detection.close_quiet(
                conn, *where, current_step=settled, now=now, stride=running.engine.stride, public_url=self._public_url
            )
            changed = bool(closed) or changed
        return changed

    def _engine_of(self, key: tuple[str, str], before_arrival: int) -> _Running:
        running = self._running.get(key)
        with self._db.connect() as conn:
            sites_at = _sites_version(conn, key[0], key[1])
            if running is not None and running.sites_at == sites_at:
                self._running.move_to_end(key)
                return running
            facts = self._detection.make_facts(_sites(conn, key[0], key[1]))
            if running is not None:
                changed = {i: f for i, f in facts.items() if running.sites.get(i) != f}
                running.engine.add_sites(changed)
                running.sites, running.sites_at = facts, sites_at
                return running
            running = _Running(self._detection.make_engine(facts), facts, sites_at)
            self._replay(conn, running, key, before_arrival)
        self._running[key] = running
        while len(self._running) > MAX_ENGINES:
            self._running.popitem(last=False)
        return running

    def _replay(self, conn: Connection, running: _Running, key: tuple[str, str], before_arrival: int) -> None:
        """Build the baselines up again from the newest batches of each rank that were looked at before.

        Newest are those of its newest session: after a restart from an earlier step the old ones hold higher steps.
        """
        b = t.hot_batch.c
        seen = (b.run_id == key[0], b.tenant == key[1], b.detected == t.BATCH_DETECTED, b.arrival < before_arrival)
        sessions = conn.execute(
            sa.select(b.rank, b.session, sa.func.max(b.step_max))
            .where(*seen, b.step_max.is_not(None))
            .group_by(b.rank, b.session, b.attempt)
            .order_by(b.attempt)
        ).all()
        newest = {rank: (session, last - REPLAY_STEPS) for rank, session, last in sessions}  # the last attempt stays
        after = dict(newest.values())
        if not after:
            return
        rows = conn.execute(
            sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.received_at, b.step_max)
            .where(*seen, b.step_max > min(after.values()))
            .order_by(b.arrival)
        ).all()
        for row in rows:
            if row.step_max <= after.get(row.session, row.step_max):
                continue
            batch = hot.load(conn, row)
            if batch is not None:
                running.engine.observe(batch)


def _pending(conn: Connection) -> Sequence[Any]:
    """The batches to take next: runs by their oldest, and within a run in the order of commit.

    The order within a run is not that of the clock, which may be set back.
    """
    b = t.hot_batch.c
    waiting = (
        sa.select(b.run_id, b.tenant, sa.func.min(b.received_at).label("since"))
        .where(b.detected == t.BATCH_PENDING)
        .group_by(b.run_id, b.tenant)
        .subquery("waiting")
    )
    of_run = sa.and_(b.run_id == waiting.c.run_id, b.tenant == waiting.c.tenant)
    return conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.attempt, b.arrival, b.received_at)
        .join(waiting, of_run)
        .where(b.detected == t.BATCH_PENDING)
        .order_by(waiting.c.since, b.run_id, b.arrival)
        .limit(BATCHES_AT_ONCE)
    ).all()


def _mark(conn: Connection, row: Any, state: int, error: str | None) -> None:
    b = t.hot_batch.c
    this = [b[name] == getattr(row, name) for name in ("run_id", "tenant", "session", "rank", "seq")]
    conn.execute(sa.update(t.hot_batch).where(*this).values(detected=state, detect_error=error))


def _sites_version(conn: Connection, run_id: str, tenant: str) -> tuple[int, float]:
    c = t.site.c
    row = conn.execute(
        sa.select(sa.func.count(), sa.func.sum(c.updated_at)).where(c.run_id == run_id, c.tenant == tenant)
    ).one()
    return int(row[0]), float(row[1] or 0.0)


def _sites(conn: Connection, run_id: str, tenant: str) -> list[Site]:
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
