"""Compactor thread: compacts, rolls up and prunes all runs in rounds.

Shapes:     a database -> the same database, smaller
Thread:     its own

Of several collectors on one database one does this, to save work; if two do, the second finds the cell changed and goes
on. A crash leaves nothing partial that anyone reads; the work is found again in the next round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from fp8watch_server.db import schema as t
from fp8watch_server.db.fence import is_fenced
from fp8watch_server.db.leader import Leader
from fp8watch_server.db.leader_loop import LeaderLoop, Pause
from fp8watch_server.store.compact import COOL_AFTER_S, CellChanged, CrashPoint, compact, groups_of, no_crash
from fp8watch_server.store.retention import DAY_S, Policy, prune, settled_after_s
from fp8watch_server.store.rollup import behind, roll_up
from fp8watch_server.store.stepless import let_go_stepless

log = logging.getLogger("fp8watch.store")

ROUND_S = 15.0
PRUNE_EVERY_S = 600.0
PRUNE_ALL_EVERY_S = DAY_S
"""Silent runs too, of which most often nothing is left to delete."""


@dataclass
class Done:
    """Result of a round."""

    num_records: int = 0
    num_groups: int = 0
    num_rolled_up: int = 0
    num_raced: int = 0

    @property
    def anything(self) -> bool:
        """Whether the next round may find more."""
        return bool(self.num_groups or self.num_rolled_up)


class Compactor:
    """Runs rounds until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy | None = None,
        *,
        clock: Callable[[], float] = time.time,
        round_s: float = ROUND_S,
        cool_after_s: float = COOL_AFTER_S,
        crash: CrashPoint = no_crash,
    ) -> None:
        self._db = engine
        self._policy = policy or Policy()
        self._clock = clock
        self._round_s = round_s
        self._cool_after_s = cool_after_s
        self._crash = crash
        self._rounds = LeaderLoop(
            "fp8watch-compact", "compaction", Leader(engine, "compact"), self._work, log, retry_s=round_s
        )
        self._pruned_at, self._pruned_all_at = -PRUNE_EVERY_S, -PRUNE_ALL_EVERY_S

    @property
    def num_failures(self) -> int:
        """Rounds that failed."""
        return self._rounds.num_failures

    def start(self) -> None:
        """Start the thread."""
        self._rounds.start()

    def wake(self) -> None:
        """Start the next round now."""
        self._rounds.wake()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the current transaction and end the thread."""
        self._rounds.stop(timeout_s)

    def _stopping(self) -> bool:
        return self._rounds.stopping

    def _work(self) -> Pause:
        while self.round().anything and not self._stopping():
            pass
        if time.monotonic() - self._pruned_at >= PRUNE_EVERY_S:
            self._prune()
        return Pause(self._round_s)

    def _prune(self) -> None:
        self._pruned_at, now, since = time.monotonic(), self._clock(), None
        if self._pruned_at - self._pruned_all_at >= PRUNE_ALL_EVERY_S:
            self._pruned_all_at = self._pruned_at
        else:
            since = now - settled_after_s(self._policy)
        prune(self._db, self._policy, now, heard_since=since, crash=self._crash, stop=self._stopping)

    def round(self) -> Done:
        """Compact everything that can be compacted now, of every run."""
        done = Done()
        with self._db.connect() as conn:
            runs = _runs(conn)
        for run_id, tenant in runs:
            if self._stopping():
                break
            try:
                self._run(run_id, tenant, done)
            except CellChanged:  # another collector works on it: the rest is for the next round
                done.num_raced += 1
            except DBAPIError as e:
                if not is_fenced(e):
                    raise
                done.num_raced += 1
        return done

    def _run(self, run_id: str, tenant: str, done: Done) -> None:
        now = self._clock()
        done.num_groups += bool(let_go_stepless(self._db, run_id, tenant, now, cool_after_s=self._cool_after_s))
        with self._db.connect() as conn:
            groups = groups_of(conn, run_id, tenant, now, cool_after_s=self._cool_after_s)
        for i, group in enumerate(groups):
            if self._stopping():
                return
            num_batches = compact(self._db, group, now, crash=self._crash)
            done.num_groups += bool(num_batches)
            done.num_records += num_batches
            if not group.more and (i + 1 == len(groups) or groups[i + 1].step0 != group.step0):
                self._roll_up(run_id, tenant, group.step0, now, done)
        with self._db.connect() as conn:
            left = behind(conn, run_id, tenant)
        waiting = {group.step0 for group in groups if group.more}
        for step0 in left:
            if step0 in waiting:
                continue
            if self._stopping():
                return
            self._roll_up(run_id, tenant, step0, now, done)

    def _roll_up(self, run_id: str, tenant: str, step0: int, now: float, done: Done) -> None:
        done.num_rolled_up += roll_up(self._db, run_id, tenant, step0, now, crash=self._crash)


def _runs(conn: Connection) -> list[tuple[str, str]]:
    b, c = t.hot_batch.c, t.cell.c
    warm = sa.select(b.run_id, b.tenant).distinct()
    late = sa.select(c.run_id, c.tenant).where(c.shown_rank.is_(None)).distinct()
    return sorted((run_id, tenant) for run_id, tenant in conn.execute(sa.union(warm, late)))
