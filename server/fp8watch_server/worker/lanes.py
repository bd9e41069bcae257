"""Which worker reads which lanes of the queue: advisory locks of the database that the batches go to.

Shapes:     -> the lanes that are ours
Thread:     any

A lane has one reader, so batches of a rank are committed in order. Workers share the lanes evenly: each counts the others by
a lock that all hold together. A worker that dies loses its locks with its connection, one that hangs after LEASE_S. The
locks only keep the order: two readers of a lane would commit nothing twice.
"""

from __future__ import annotations

import contextlib
import threading

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db.lease import lease_session
from fp8watch_server.queue.subjects import NUM_LANES
from fp8watch_server.worker.alive import session_name

CLASS = 0x66703871
"""First half of the keys of these locks; the second is the lane."""
PRESENT = 1 << 16

_COUNT = sa.text(
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = :of "
    "AND objid = :present AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TRY = sa.text("SELECT pg_try_advisory_lock(:of, :lane)")
_GIVE = sa.text("SELECT pg_advisory_unlock(:of, :lane)")


class Lanes:
    """One per worker and database.

    Args:
        engine: the database.
        num_lanes: how many it has.
    """

    def __init__(self, engine: Engine, num_lanes: int = NUM_LANES) -> None:
        self._num_lanes = num_lanes
        self._own = sa.create_engine(engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        self._conn: Connection | None = None
        self._held: set[int] = set()
        self._surplus: list[int] = []
        self._lock = threading.Lock()

    def hold(self) -> set[int]:
        """Claim our share of the lanes; returns those that are ours, without those that are to be given back.

        Raises:
            SQLAlchemyError: the database cannot be asked; no lane is ours.
        """
        with self._lock:
            return self._hold()

    def give_back(self) -> None:
        """Let others have the lanes beyond our share. To be called when nothing of them is in hand any more.

        Raises:
            SQLAlchemyError: the database cannot be asked; no lane is ours.
        """
        with self._lock:
            try:
                while self._conn is not None and self._surplus:
                    self._conn.execute(_GIVE, {"of": CLASS, "lane": self._surplus[-1]})
                    self._held.discard(self._surplus.pop())
            except SQLAlchemyError:
                self._drop()
                raise

    def beat(self) -> None:
        """Say that we are there, also while a commit takes long."""
        with self._lock:
            if self._conn is not None:
                try:
                    self._conn.execute(sa.text("SELECT 1"))
                except SQLAlchemyError:
                    self._drop()

    def _hold(self) -> set[int]:
        try:
            conn = self._conn or self._connect()
            num_workers = max(1, int(conn.execute(_COUNT, {"of": CLASS, "present": PRESENT}).scalar_one()))
            share = -(-self._num_lanes // num_workers)
            self._surplus = sorted(self._held)[share:]
            for lane in range(self._num_lanes):
                if len(self._held) >= share:
                    break
                if lane not in self._held and conn.execute(_TRY, {"of": CLASS, "lane": lane}).scalar_one():
                    self._held.add(lane)
        except SQLAlchemyError:
            self._drop()
            raise
        return self._held.difference(self._surplus)

    def _connect(self) -> Connection:
        self._conn = conn = self._own.connect()
        lease_session(conn)
        conn.execute(sa.text("SELECT set_config('application_name', :name, false)"), {"name": session_name()})
        conn.execute(sa.text("SELECT pg_advisory_lock_shared(:of, :present)"), {"of": CLASS, "present": PRESENT})
        return conn

    def release(self) -> None:
        """Give all lanes back."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        self._held.clear()
        self._surplus = []
        if conn is not None:
            with contextlib.suppress(SQLAlchemyError):
                conn.close()
