"""A run moved from one database to another while it trains.

Shapes:     run id, name of a shard -> the run lies there
Thread:     main

    copying   shard = from, moving_to = to      the target has nothing yet but tables beside the real ones
    (fence)   the source refuses all changes    agents get 503 and keep their batches
    (whole)   the target has the run            in one transaction
    cleaning  shard = to, moved_from = from     the source still has its copy, behind the fence
    done      the source has a note of where the run went

What was reached is written in the directory before the next is begun. Killed at any point, the same command goes on: before
the target is whole it begins again, and from then on it only goes forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import for_writing, upsert, writing
from fp8watch_server.db.fence import raise_fence, tables_of_runs, take_down
from fp8watch_server.db.moves_under_way import UnderWay, lock_key, moves_under_way
from fp8watch_server.db.shards import Shards
from fp8watch_server.moving.copying import StagedCopy

MAX_PASSES = 8
FEW_ROWS = 2000
"""A pass that copies no more than this is short enough to be waited for."""
LEASED_S = 10.0
"""How long a message that is being sent may take."""

CrashPoint = Callable[[str], None]


def no_crash(point: str) -> None:
    """Nothing happens here; tests kill."""


class CannotMove(ValueError):
    """A move that cannot be, with the remedy."""


@dataclass
class Moved:
    """What a move did."""

    num_rows: int = 0
    refused_s: float = 0.0


class Move:
    """One move.

    Args:
        shards: home and all shards.
        run_id: the run.
        to: name of a shard; "": home.
        drain: waits until the queue has no batch of the run for a database that is named; None: there is no queue.
    """

    def __init__(
        self,
        shards: Shards,
        run_id: str,
        to: str,
        *,
        drain: Callable[[str], None] | None = None,
        crash: CrashPoint = no_crash,
    ) -> None:
        self._shards, self._run_id, self._to = shards, run_id, to
        self._drain, self._crash = drain, crash
        self._done = Moved()

    def run(self) -> Moved:
        """Move, or finish a move that was cut short.

        Raises:
            CannotMove: what is asked for makes no sense, or another move of the run is under way.
            ShardAway, SQLAlchemyError: start it again when the databases are there.
        """
        if self._shards.home.dialect.name != "postgresql":
            raise CannotMove("runs move between PostgreSQL servers; the home database is an SQLite file")
        own = self._shards.home.execution_options(isolation_level="AUTOCOMMIT")
        with own.connect() as conn:  # this session's lock, for as long as it lives
            key = lock_key(self._run_id)
            if not conn.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar_one():
                raise CannotMove(f"run {self._run_id!r} is being moved by another process; wait for it, or end it")
            try:
                self._move()
            finally:
                conn.execute(sa.select(sa.func.pg_advisory_unlock(key)))
        return self._done

    def _move(self) -> None:
        row = self._row()
        if row.moved_from is not None:
            self._clean(row.moved_from, row.shard)
            row = self._row()
        if row.shard == self._to and row.moving_to is None:
            return
        if row.moving_to not in (None, self._to):
            raise CannotMove(
                f"a move of run {self._run_id!r} to {row.moving_to or 'home'!r} was cut short; finish that one first"
            )
        source, target = self._shards.named(row.shard), self._shards.named(self._to)
        for engine in (source, target):
            if engine.dialect.name != "postgresql":
                raise CannotMove("runs move between PostgreSQL servers; this shard is an SQLite file")
        if row.moving_to is None:
            if self._lies_in(target):
                raise CannotMove(
                    f"there is a run {self._run_id!r} on {self._to or 'home'!r} already; delete or rename it"
                )
            self._note(moving_to=self._to)
            self._crash("noted")
        elif self._lies_in(target):  # a transaction that was whole
            self._switch(row.shard)
            return
        copy = StagedCopy(source, target, self._run_id)
        try:
            self._copy(copy, row.shard, source, target)
        except (Exception, KeyboardInterrupt):
            if not self._lies_in(target):  # else the next try goes on from here
                take_down(source, self._run_id)
                copy.clear()
                self._note(moving_to=None, refuses=False)
            raise
        self._switch(row.shard)

    def _copy(self, copy: StagedCopy, of: str, source: Engine, target: Engine) -> None:
        take_down(source, self._run_id)  # of a try that was cut short: nobody waits while we copy
        self._note(refuses=False)
        copy.begin()
        for _ in range(MAX_PASSES):
            if copy.catch_up() <= FEW_ROWS:
                break
        self._crash("copied")
        began = time.monotonic()
        self._note(refuses=True)
        self._crash("refused")
        if self._drain is not None:
            self._drain(of)
            copy.catch_up()
        self._let_messages_go(source)
        raise_fence(source, self._run_id)
        self._crash("fenced")
        copy.catch_up(last=True)
        with for_writing(target).begin() as conn:
            copy.put_in_place(conn)
            self._crash("in place")
        self._crash("whole")
        self._done = Moved(copy.num_rows, began)

    def _switch(self, before: str) -> None:
        with writing(self._shards.home) as conn:
            c = t.shard_of_run.c
            done = {"shard": self._to, "moving_to": None, "moved_from": before, "refuses": False}
            conn.execute(
                sa.update(t.shard_of_run)
                .where(c.run_id == self._run_id, c.tenant == t.DEFAULT_TENANT)
                .values(**done, num_moves=c.num_moves + 1)
            )
        if self._done.refused_s:
            self._done.refused_s = time.monotonic() - self._done.refused_s
        self._crash("switched")
        self._clean(before, self._to)

    def _clean(self, before: str, now: str) -> None:
        """Delete the copy of a database that the run has left, and leave a note there."""
        source = self._shards.named(before)
        with for_writing(source).begin() as conn:
            conn.exec_driver_sql("SELECT set_config('fp8watch.mover', 'on', true)")  # the fence lets it through
            note = {"run_id": self._run_id, "tenant": t.DEFAULT_TENANT, "moved_to": now, "moved_at": time.time()}
            upsert(conn, t.moved_run, [note])
            for table in reversed(tables_of_runs()):
                conn.execute(sa.delete(table).where(table.c.run_id == self._run_id))
            self._crash("deleted")
        self._crash("cleaned")
        take_down(source, self._run_id)
        self._note(moved_from=None)

    def _let_messages_go(self, source: Engine) -> None:
        """A message that is being sent is noted as sent first, so that nobody sends it again."""
        until, o = time.monotonic() + LEASED_S, t.outbox.c
        leased = sa.select(o.id).where(o.run_id == self._run_id, o.state.in_(["leased", "grouped"])).limit(1)
        while time.monotonic() < until:
            with source.connect() as conn:
                if conn.execute(leased).first() is None:
                    return
            time.sleep(0.05)

    def _lies_in(self, engine: Engine) -> bool:
        r = t.run.c
        with engine.connect() as conn:
            here = sa.select(r.run_id).where(r.run_id == self._run_id, r.tenant == t.DEFAULT_TENANT)
            return conn.execute(here).first() is not None

    def _row(self) -> Any:
        """What the directory says of the run; a run from before there were shards gets a row."""
        place = self._shards.directory.read(self._run_id)
        if place is None:
            raise CannotMove(f"there is no run {self._run_id!r}; fp8watch runs lists them")
        d = t.shard_of_run.c
        with writing(self._shards.home) as conn:
            row = {"run_id": self._run_id, "tenant": t.DEFAULT_TENANT, "shard": place, "placed_at": time.time()}
            upsert(conn, t.shard_of_run, [row], update=())
            return conn.execute(sa.select(t.shard_of_run).where(d.run_id == self._run_id)).one()

    def _note(self, **what: Any) -> None:
        d = t.shard_of_run.c
        of_run = (d.run_id == self._run_id, d.tenant == t.DEFAULT_TENANT)
        with writing(self._shards.home) as conn:
            conn.execute(sa.update(t.shard_of_run).where(*of_run).values(**what))


def places(conn: Connection) -> list[tuple[str, str, str]]:
    """(run, shard, what is under way) of the directory."""
    d, under_way = t.shard_of_run.c, {move.run_id: move for move in moves_under_way(conn)}
    rows = conn.execute(sa.select(d.run_id, d.shard).order_by(d.run_id)).all()
    return [(row.run_id, row.shard or "home", _said(under_way.get(row.run_id))) for row in rows]


def _said(move: UnderWay | None) -> str:
    if move is None:
        return ""
    what = "its old copy is to be deleted" if move.arrived else f"a move to {move.to or 'home'} was begun"
    if move.at_work:
        return f"{what}, and is under way"
    refused = " its batches are refused;" if move.refuses else ""
    return f"{what}, and was cut short;{refused} start it again: fp8watch shards move {move.run_id} {move.to or 'home'}"
