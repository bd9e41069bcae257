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
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fp8watch_agent.wire import Batch, WireError
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import OF_THE_VALUES, writing
from fp8watch_server.db.fence import is_fenced, lost_its_run
from fp8watch_server.db.leader import Leader
from fp8watch_server.db.leader_loop import LeaderLoop, Pause
from fp8watch_server.db.lease import lease_transaction
from fp8watch_server.db.planner_statistics import PlannerStatistics
from fp8watch_server.detect.finding import LEFT_OUT
from fp8watch_server.pipeline import engine_restore
from fp8watch_server.pipeline.detection import Detection as Detection
from fp8watch_server.pipeline.priority import PriorityLane, Run
from fp8watch_server.pipeline.run_engines import RunEngines, Running
from fp8watch_server.store import hot_batches
from fp8watch_server.store.late_steps import add_late_steps
from fp8watch_server.store.pending import BATCHES_AT_ONCE, Overtaken, mark, pending, urgent_runs, waiting_runs
from fp8watch_server.store.totals import add_totals

log = logging.getLogger("fp8watch.detect")

SAVE_EVERY_BATCHES, SAVE_EVERY_S = 4096, 30.0
SAVE_SHARE = 0.02
"""Of the time, at most: the state of ten thousand ranks takes a second."""
PACE_S, MAX_PACE_S, REST_SHARE = 0.2, 0.5, 3.0
"""Between groups; the first batch after a quiet time is taken at once. The more there is to do, the longer the rest and
the larger the next group: as long as REST_SHARE groups take, within these bounds."""
IDLE_S = FENCED_S = 1.0

_Late = list[tuple[str, int, int]]
"""Session, number of steps that came too late, the last of them."""


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
        self._engines = RunEngines(db, detection, meanwhile=self._take_urgent_of_others, put_away=self._put_away)
        self._planner = PlannerStatistics(db)
        self._urgent = PriorityLane()
        self._unheard = threading.Event()  # urgent batches may wait that nobody told of
        self._taken_to: dict[tuple[str, str], int] = {}  # last arrival of each run that this round has processed
        self._rounds = LeaderLoop(
            "fp8watch-detect", "detection", Leader(db, "detect"), self._work, log, forget=self._forget
        )
        self._fenced: dict[tuple[str, str], float] = {}
        self.num_failed_batches = self.num_failed_saves = 0
        self._ticked_at = -IDLE_S

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

    def look_for_urgent(self) -> None:
        """Signal that urgent batches may have been committed unheard."""
        self._unheard.set()
        self._rounds.wake_now()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the current group and end the thread."""
        self._rounds.stop(timeout_s)

    def _work(self) -> Pause:
        began = time.monotonic()
        self._planner.renew()
        taken = self.drain()
        if not taken or time.monotonic() - self._ticked_at >= IDLE_S:
            self.tick(but={*self._taken_to, *self._waiting()})
        if taken >= BATCHES_AT_ONCE:
            return Pause(0.0, wakes=False)
        if taken:
            return Pause(min(MAX_PACE_S, max(PACE_S, REST_SHARE * (time.monotonic() - began))), wakes=False)
        return Pause(IDLE_S)

    def _waiting(self) -> Collection[Run]:
        """Runs of which batches wait: by their clocks those would be late that are here."""
        with self._db.connect() as conn:
            return waiting_runs(conn)

    def _forget(self) -> None:
        self._engines.clear()
        self._urgent.clear()
        self._unheard.set()

    def drain(self) -> int:
        """Process what is pending now, urgent runs first; returns the number of batches."""
        self._taken_to.clear()
        self._look_through()
        taken = self._take_urgent()
        with self._db.connect() as conn:
            rows = [row for row in pending(conn) if not self._is_fenced((row.run_id, row.tenant))]
        taken += self._take_urgent()
        for key, of_run in groupby(rows, key=lambda row: (row.run_id, row.tenant)):
            waiting = list(of_run)
            while rest := [row for row in waiting if row.arrival > self._taken_to.get(key, 0)]:
                if self._rounds.stopping:
                    break
                waiting = rest[self._take(rest, give_way=True) :]
                self._take_urgent()
        return taken + len(rows)

    def _look_through(self) -> None:
        """Find the urgent runs in all that waits: nobody need have told of them, and much may wait before them."""
        self._unheard.clear()
        with self._db.connect() as conn:
            found = urgent_runs(conn)
        for run in found:
            if not self._is_fenced(run):
                self._urgent.add(run)

    def _is_fenced(self, key: tuple[str, str]) -> bool:
        """Whether a run was found to be moving a moment ago."""
        at = self._fenced.get(key)
        if at is not None and time.monotonic() - at > FENCED_S:
            del self._fenced[key]
            return False
        return at is not None

    def _take_urgent_of_others(self, restoring: Collection[Run]) -> None:
        """While the engines of some runs are being restored, which takes seconds: they cannot be used yet."""
        if self._unheard.is_set():
            self._look_through()
        if self._urgent:
            self._take_urgent(restoring)

    def _take_urgent(self, but: Collection[Run] = ()) -> int:
        num = 0
        while not self._rounds.stopping and (run := self._urgent.take(but)) is not None:
            with self._db.connect() as conn:
                rows = pending(conn, run)
            if rows:
                num += self._take(list(rows))
        return num

    def tick(self, but: Collection[Run] = ()) -> None:
        """Advance the clocks of all engines, but of runs whose batches have just come, or wait."""
        self._ticked_at = time.monotonic()
        for key, running in self._engines.items():
            if key in but:
                continue
            findings = running.engine.tick(self._clock())
            if not findings:
                continue
            try:
                with writing(self._db) as conn:
                    settled, stride = running.engine.delivered_step, running.engine.stride
                    idle = _Judged(_Idle(engine_restore.newest_attempt(conn, *key)), None, findings, settled, stride)
                    changed = self._write_incidents(conn, key, [idle], running)
            except SQLAlchemyError as e:
                self._engines.drop(key)  # it says what it has found once
                if not isinstance(e, DBAPIError) or (not lost_its_run(e) and not isinstance(e, DataError)):
                    raise
                continue
            if changed:
                self._on_change()

    def _take(self, rows: list[Any], give_way: bool = False, *, again: bool = False) -> int:
        """Process batches of one run; returns how many: all, unless an urgent run interrupted. `again`: a batch whose key was taken."""
        key = (rows[0].run_id, rows[0].tenant)
        num = len(rows)
        try:
            num, judged, late = self._judge(key, rows, give_way)
            changed = self._commit(key, judged, late)
        except (OperationalError, InterfaceError, PoolTimeoutError):
            self._engines.drop(key)  # it may have seen uncommitted batches
            raise  # a database problem: retried later
        except Overtaken:
            log.warning("another collector looks at run %r as well; beginning again", key[0])
            self._engines.drop(key)
            return len(rows)
        except Exception as e:
            self._engines.drop(key)  # the engine has seen uncommitted batches
            if is_fenced(e):  # whoever has the run next goes on
                self._fenced[key] = time.monotonic()
                return len(rows)
            if isinstance(e, DBAPIError) and (e.connection_invalidated or not isinstance(e, OF_THE_VALUES)):
                raise  # the database says it of itself: no batch is at fault
            if isinstance(e, IntegrityError) and len(rows) == 1 and not again:  # somebody was quicker, and that is over
                return self._take(rows, again=True)
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

    def _judge(self, key: tuple[str, str], rows: list[Any], give_way: bool) -> tuple[int, list[_Judged], _Late]:
        out: list[_Judged] = []
        num = 0
        running = self._engines.of(key, rows[0].arrival, {row.session for row in rows})
        engine = running.engine
        with self._db.connect() as conn:
            unresolved = _has_unresolved(conn, key)
            for row, batch in zip(rows, hot_batches.load_each(conn, rows), strict=True):
                if num and give_way and self._urgent:
                    break  # the rest of this run follows the urgent one
                num += 1
                if isinstance(batch, WireError):  # damaged, or of a newer version: it must not block those behind it
                    out.append(_Judged(row, None, (), error=f"{type(batch).__name__}: {batch}"))
                    continue
                if batch is None:
                    continue
                findings = engine.observe(batch, at=row.received_at)
                unresolved = unresolved or bool(findings)
                settled = engine.delivered_step if unresolved else None
                out.append(_Judged(row, batch, findings, settled, engine.stride if unresolved else 1))
        late: _Late = []
        for notice in engine.take_notices():
            log.info("run %r, rank %s, step %s: %s", key[0], notice.rank, notice.step, notice.text)
            if notice.kind == LEFT_OUT:
                late.append((notice.session, notice.num, notice.step))
        return num, out, late

    def _commit(self, key: tuple[str, str], judged: list[_Judged], late: _Late) -> bool:
        if not judged:
            return False
        running = self._engines.kept(key)
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
            add_late_steps(conn, *key, late)  # last: batches of these sessions wait from here on
        return changed

    def _save(self, conn: Connection, key: tuple[str, str], running: Running, judged: list[_Judged]) -> None:
        """Save the engine's state from time to time, in the transaction of the marks, so that both agree."""
        running.since_saved += len(judged)
        running.arrival = judged[-1].row.arrival
        now = time.monotonic()
        if running.engine.settling:  # what it holds back would be lacking; behind the state of before it comes again
            return
        if now - running.saved_at < running.save_took_s / SAVE_SHARE:
            return
        if running.since_saved >= SAVE_EVERY_BATCHES or now - running.saved_at >= SAVE_EVERY_S:
            saved = engine_restore.save(conn, running.engine, *key, judged[-1].row.arrival, self._clock())
            self.num_failed_saves += not saved
            running.since_saved, running.saved_at = 0, now
            running.save_took_s = time.monotonic() - now

    def _put_away(self, key: tuple[str, str], running: Running) -> None:
        """Save an engine that leaves memory, as far as it has seen batches since it was saved."""
        if not running.since_saved or running.engine.settling:
            return
        try:
            with writing(self._db) as conn:
                lease_transaction(conn)
                engine_restore.save(conn, running.engine, *key, running.arrival, self._clock())
        except DBAPIError as e:
            if not lost_its_run(e):
                raise

    def _mark_failed(self, row: Any, e: Exception) -> bool:
        """Count a batch that broke detectors or incidents, and mark it as failed."""
        with self._db.connect() as conn:
            batch = hot_batches.load(conn, row)
        with writing(self._db) as conn:
            mark(conn, (row.run_id, row.tenant), [row.arrival], t.BATCH_FAILED, f"{type(e).__name__}: {e}"[:2000])
            if batch is not None:
                add_totals(conn, row.run_id, row.tenant, [(batch, row.attempt)])
        return False

    def _write_incidents(self, conn: Connection, key: tuple[str, str], judged: list[_Judged], running: Running) -> bool:
        now, changed = self._clock(), False
        unresolved = _has_unresolved(conn, key)
        after = int(running.engine.thresholds.close_after_steps)
        said = {"after_clean_steps": after, "public_url": self._public_url}
        settled: int | None = None
        for j in judged:
            where = (*key, j.row.attempt)
            if j.findings:
                opened = self._detection.fold(conn, *where, j.findings, running.sites, now, window_steps=6, **said)
                changed = bool(opened) or changed
                unresolved = True
            if unresolved and j.delivered_step is not None and (j.delivered_step != settled or j.findings):
                settled = j.delivered_step
                closed = self._detection.close_quiet(
                    conn, *where, current_step=settled, now=now, stride=j.stride, **said
                )
                changed = bool(closed) or changed
        return changed


def _has_unresolved(conn: Connection, key: tuple[str, str]) -> bool:
    c = t.incident.c
    where = (c.run_id == key[0], c.tenant == key[1], c.status != "resolved")
    return conn.execute(sa.select(sa.literal(1)).where(*where).limit(1)).first() is not None
