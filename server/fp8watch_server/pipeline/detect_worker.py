"""Detect worker: runs the detectors once over every committed batch, in commit order.

Upstream:   fp8watch_server.store.hot_batches, fp8watch_server.pipeline.priority
Downstream: fp8watch_server.detect.engine (wired in fp8watch_server.app), fp8watch_server.store.totals
Shapes:     hot_batch rows that are pending -> findings -> incidents, in one transaction with their marks
Thread:     its own; of several collectors on one database, that of the leader

Batches are marked in the transaction that writes their incidents, so a crash loses nothing and repeats nothing. All
waiting batches of a run are processed together, with a pause in between, because writing costs per transaction and
detecting per batch. A run with an urgent batch ends the pause, and is processed first. If a batch breaks a detector or
its incidents, the batches of its group are processed one by one.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fp8watch_agent.wire import Batch, WireError
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.fence import is_fenced, lost_its_run
from fp8watch_server.db.leader import Leader
from fp8watch_server.db.leader_loop import LeaderLoop, Pause
from fp8watch_server.db.lease import lease_transaction
from fp8watch_server.pipeline import engine_restore
from fp8watch_server.pipeline.priority import PriorityLane
from fp8watch_server.store import hot_batches
from fp8watch_server.store.pending import BATCHES_AT_ONCE, Overtaken, mark, pending
from fp8watch_server.store.totals import add_totals

log = logging.getLogger("fp8watch.detect")

MAX_ENGINES = 64
SAVE_EVERY_BATCHES, SAVE_EVERY_S = 4096, 30.0
PACE_S, MAX_PACE_S, REST_SHARE = 0.2, 0.5, 3.0
"""Between groups; the first batch after a quiet time is taken at once. The more there is to do, the longer the rest and
the larger the next group: as long as REST_SHARE groups take, within these bounds."""
IDLE_S = FENCED_S = 1.0


class DetectEngine(Protocol):
    """One run's detectors: no I/O, no database."""

    def observe(self, batch: Batch, at: float | None = None) -> Sequence[Any]:
        """Findings of one batch, received at a time of this collector's clock."""
        ...

    def tick(self, now: float) -> Sequence[Any]:
        """Findings that waited for a late rank; called while no batches come."""
        ...

    def add_sites(self, sites: Any) -> None:
        """Facts of new or changed sites."""
        ...

    def add_sessions(self, sessions: Any) -> None:
        """All sessions of the run, new and known ones."""
        ...

    def take_notices(self) -> Sequence[Any]:
        """Log-worthy observations that are no faults; each has a `kind`, a `step`, a `rank` and a `text`."""
        ...

    @property
    def delivered_step(self) -> int | None:
        """The last step that every live rank has delivered."""
        ...

    @property
    def stride(self) -> int:
        """Steps between observed steps."""
        ...


@dataclass(frozen=True)
class Detection:
    """Downstream stages, injected as callables."""

    make_facts: Callable[[Any], Mapping[int, Any]]  # of a list of record.Site
    make_engine: Callable[[Mapping[int, Any], str, str], DetectEngine]  # facts of the sites, run id, run name
    fold: Callable[..., Sequence[Any]]
    close_quiet: Callable[..., Any]
    queue_resolved: Callable[[Connection, Mapping[str, Any], float, str], None]
    """Queue the message of an incident that a person has resolved: (connection, row, now, public URL)."""
    make_sessions: Callable[[Any], Any] = lambda rows: rows
    """Of rows of the session table what `add_sessions` takes."""
    load_engine: Callable[[bytes, Mapping[int, Any]], DetectEngine] | None = None
    """An engine out of what its `dump` gave, with the facts of its sites; a ValueError says that it cannot be."""


@dataclass
class _Running:
    engine: DetectEngine
    sites: Mapping[int, Any]
    seen: engine_restore.Registered
    since_saved: int = 0  # batches
    saved_at: float = 0.0


@dataclass(frozen=True)
class _Judged:
    """One batch with its findings."""

    row: Any
    batch: Batch | None
    findings: Sequence[Any]
    delivered_step: int | None = None
    stride: int = 1
    error: str = ""  # why there is no batch


@dataclass(frozen=True)
class _Idle:
    """Stands for a batch's row when findings come from elapsed time alone."""

    attempt: int


class DetectWorker:
    """Processes pending batches until it is stopped."""

    def __init__(
        self,
        db: Engine,
        detection: Detection,
        *,
        public_url: str = "",
        clock: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._detection = detection
        self._public_url = public_url
        self._clock = clock
        self._on_change = on_change
        self._running: OrderedDict[tuple[str, str], _Running] = OrderedDict()
        self._urgent = PriorityLane()
        self._taken_to: dict[tuple[str, str], int] = {}  # last arrival of each run that this round has processed
        self._rounds = LeaderLoop(
            "fp8watch-detect", "detection", Leader(db, "detect"), self._work, log, forget=self._forget
        )
        self._fenced: dict[tuple[str, str], float] = {}
        self.num_failed_batches = 0

    def start(self) -> None:
        """Start the thread. Batches that were pending when the collector last stopped come first."""
        self._rounds.start()

    def wake(self) -> None:
        """Signal that there may be new batches."""
        self._rounds.wake()

    def wake_for(self, run_id: str, tenant: str) -> None:
        """Signal an urgent batch of this run."""
        if self._urgent.add((run_id, tenant)):
            self._rounds.wake_now()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the current group and end the thread."""
        self._rounds.stop(timeout_s)

    def _work(self) -> Pause:
        began = time.monotonic()
        taken = self.drain()
        if taken >= BATCHES_AT_ONCE:
            return Pause(0.0, wakes=False)
        if taken:
            return Pause(min(MAX_PACE_S, max(PACE_S, REST_SHARE * (time.monotonic() - began))), wakes=False)
        self.tick()
        return Pause(IDLE_S)

    def _forget(self) -> None:
        self._running.clear()
        self._urgent.clear()

    def drain(self) -> int:
        """Process what is pending now, urgent runs first; returns the number of batches."""
        self._taken_to.clear()
        taken = self._take_urgent()
        with self._db.connect() as conn:
            rows = [row for row in pending(conn) if not self._is_fenced((row.run_id, row.tenant))]
        for key, of_run in groupby(rows, key=lambda row: (row.run_id, row.tenant)):
            waiting = list(of_run)
            while rest := [row for row in waiting if row.arrival > self._taken_to.get(key, 0)]:
                if self._rounds.stopping:
                    break
                waiting = rest[self._take(rest, give_way=True) :]
                self._take_urgent()
        return taken + len(rows)

    def _is_fenced(self, key: tuple[str, str]) -> bool:
        """Whether a run was found to be moving a moment ago."""
        at = self._fenced.get(key)
        if at is not None and time.monotonic() - at > FENCED_S:
            del self._fenced[key]
            return False
        return at is not None

    def _take_urgent(self) -> int:
        num = 0
        while not self._rounds.stopping and (run := self._urgent.take()) is not None:
            with self._db.connect() as conn:
                rows = pending(conn, run)
            if rows:
                num += self._take(list(rows))
        return num

    def tick(self) -> None:
        """Nothing pending: advance the engines' clocks."""
        for key, running in list(self._running.items()):
            findings = running.engine.tick(self._clock())
            if not findings:
                continue
            try:
                with writing(self._db) as conn:
                    settled, stride = running.engine.delivered_step, running.engine.stride
                    idle = _Judged(_Idle(engine_restore.newest_attempt(conn, *key)), None, findings, settled, stride)
                    changed = self._write_incidents(conn, key, [idle], running)
            except DBAPIError as e:
                if not lost_its_run(e):
                    raise
                self._running.pop(key, None)
                continue
            if changed:
                self._on_change()

    def _take(self, rows: list[Any], give_way: bool = False) -> int:
        """Process batches of one run; returns how many: all, unless an urgent run interrupted."""
        key = (rows[0].run_id, rows[0].tenant)
        num = len(rows)
        try:
            num, judged = self._judge(key, rows, give_way)
            changed = self._commit(key, judged)
        except (OperationalError, InterfaceError, PoolTimeoutError):
            raise  # a database problem: retried later
        except DBAPIError as e:
            if not is_fenced(e):
                raise
            self._running.pop(key, None)  # whoever has the run next goes on
            self._fenced[key] = time.monotonic()
            return len(rows)
        except Overtaken:
            log.warning("another collector looks at run %r as well; beginning again", key[0])
            self._running.pop(key, None)
            return len(rows)
        except Exception as e:
            self._running.pop(key, None)  # the engine has seen uncommitted batches
            if len(rows) > 1:
                for row in rows:
                    self._take([row])
                return len(rows)
            log.exception("batch %s of run %r could not be looked at; going on without it", rows[0].seq, key[0])
            self.num_failed_batches += 1
            changed = self._mark_failed(rows[0], e)
        self._taken_to[key] = rows[num - 1].arrival
        if changed:
            self._on_change()
        return num

    def _judge(self, key: tuple[str, str], rows: list[Any], give_way: bool) -> tuple[int, list[_Judged]]:
        out: list[_Judged] = []
        num = 0
        running = self._engine_of(key, rows[0].arrival)
        engine = running.engine
        with self._db.connect() as conn:
            unresolved = _has_unresolved(conn, key)
            for row in rows:
                if num and give_way and self._urgent:
                    break  # the rest of this run follows the urgent one
                num += 1
                try:
                    batch = hot_batches.load(conn, row)
                except WireError as e:  # damaged, or of a newer version: it must not block those behind it
                    out.append(_Judged(row, None, (), error=f"{type(e).__name__}: {e}"))
                    continue
                if batch is None:
                    continue
                findings = engine.observe(batch, at=row.received_at)
                unresolved = unresolved or bool(findings)
                settled = engine.delivered_step if unresolved else None  # costs a loop over all ranks
                out.append(_Judged(row, batch, findings, settled, engine.stride if unresolved else 1))
        for notice in engine.take_notices():
            log.info("run %r, rank %s, step %s: %s", key[0], notice.rank, notice.step, notice.text)
        return num, out

    def _commit(self, key: tuple[str, str], judged: list[_Judged]) -> bool:
        if not judged:
            return False
        running = self._running[key]
        with writing(self._db) as conn:
            lease_transaction(conn)
            for j in judged:
                if j.error:
                    log.error("batch %s of run %r cannot be read (%s); going on without it", j.row.seq, key[0], j.error)
                    self.num_failed_batches += 1
                    mark(conn, key, [j.row.arrival], t.BATCH_FAILED, j.error[:2000])
            mark(conn, key, [j.row.arrival for j in judged if not j.error], t.BATCH_DETECTED, None)
            changed = self._write_incidents(conn, key, judged, running)
            add_totals(conn, *key, [(j.batch, j.row.attempt) for j in judged if j.batch is not None])
            self._save(conn, key, running, judged)
        return changed

    def _save(self, conn: Connection, key: tuple[str, str], running: _Running, judged: list[_Judged]) -> None:
        """Save the engine's state from time to time, in the transaction of the marks, so that both agree."""
        running.since_saved += len(judged)
        now = time.monotonic()
        if running.since_saved >= SAVE_EVERY_BATCHES or now - running.saved_at >= SAVE_EVERY_S:
            engine_restore.save(conn, running.engine, *key, judged[-1].row.arrival, self._clock())
            running.since_saved, running.saved_at = 0, now

    def _mark_failed(self, row: Any, e: Exception) -> bool:
        """Count a batch that broke detectors or incidents, and mark it as failed."""
        with self._db.connect() as conn:
            batch = hot_batches.load(conn, row)
        with writing(self._db) as conn:
            mark(conn, (row.run_id, row.tenant), [row.arrival], t.BATCH_FAILED, f"{type(e).__name__}: {e}"[:2000])
            if batch is not None:
                add_totals(conn, row.run_id, row.tenant, [(batch, row.attempt)])
        return False

    def _write_incidents(
        self, conn: Connection, key: tuple[str, str], judged: list[_Judged], running: _Running
    ) -> bool:
        now, changed = self._clock(), False
        unresolved = _has_unresolved(conn, key)
        settled: int | None = None
        for j in judged:
            where = (*key, j.row.attempt)
            if j.findings:
                opened = self._detection.fold(
                    conn, *where, j.findings, running.sites, now, window_steps=6, public_url=self._public_url
                )
                changed = bool(opened) or changed
                unresolved = True
            if unresolved and j.delivered_step is not None and (j.delivered_step != settled or j.findings):
                settled = j.delivered_step
                closed = self._detection.close_quiet(
                    conn, *where, current_step=settled, now=now, stride=j.stride, public_url=self._public_url
                )
                changed = bool(closed) or changed
        return changed

    def _engine_of(self, key: tuple[str, str], before_arrival: int) -> _Running:
        running = self._running.get(key)
        with self._db.connect() as conn:
            seen = engine_restore.registered(conn, *key)
            if running is not None and running.seen == seen:
                self._running.move_to_end(key)
                return running
            facts = self._detection.make_facts(engine_restore.sites_of(conn, *key))
            sessions = self._detection.make_sessions(engine_restore.sessions_of(conn, *key))
            if running is not None:
                running.engine.add_sites({i: f for i, f in facts.items() if running.sites.get(i) != f})
                running.engine.add_sessions(sessions)
                running.sites, running.seen = facts, seen
                return running
            running = _Running(self._restored(conn, key, facts, sessions, before_arrival), facts, seen)
            running.saved_at = time.monotonic()
        self._running[key] = running
        while len(self._running) > MAX_ENGINES:
            self._running.popitem(last=False)
        return running

    def _restored(
        self, conn: Connection, key: tuple[str, str], facts: Mapping[int, Any], sessions: Any, before_arrival: int
    ) -> DetectEngine:
        """Restore an engine from its saved state and later batches; else rebuild it from the newest samples."""
        saved = engine_restore.saved(conn, *key, before_arrival)
        if saved is not None and self._detection.load_engine is not None:
            try:
                loaded = self._detection.load_engine(saved.state, facts)
            except ValueError as e:
                log.info("run %r: what its detectors remembered is not used: %s", key[0], e)
            else:
                loaded.add_sessions(sessions)
                engine_restore.replay_since(conn, loaded, *key, saved.arrival, before_arrival)
                loaded.take_notices()
                return loaded
        made = self._detection.make_engine(facts, key[0], engine_restore.run_name(conn, *key))
        made.add_sessions(sessions)
        engine_restore.replay(conn, made, *key, before_arrival)
        made.take_notices()
        return made


def _has_unresolved(conn: Connection, key: tuple[str, str]) -> bool:
    c = t.incident.c
    where = (c.run_id == key[0], c.tenant == key[1], c.status != "resolved")
    return conn.execute(sa.select(sa.literal(1)).where(*where).limit(1)).first() is not None
