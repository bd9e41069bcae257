"""Leader election among collectors on one database: one runs the detectors, one compacts.

Shapes:     (engine, what for) -> whether it is us
Thread:     the one that works

On PostgreSQL it is an advisory lock, held by a dedicated connection, so a collector that dies releases it at once. A thread
keeps that connection talking, and PostgreSQL ends it after LEASE_S of silence: a collector that hangs, or whose machine is
gone, is followed as well. SQLite has one collector, which always leads. Leadership only saves work and is no safety mechanism: what the leader
writes must be safe even if two believe that they lead.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db.lease import BEAT_S, lease_session


class Leader:
    """One per worker thread.

    Args:
        engine: the database.
        name: of the work; each has a leader of its own.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._own: Engine | None = None
        if engine.dialect.name == "postgresql":  # a dedicated connection, so that the pool keeps all of its own
            self._own = sa.create_engine(engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        self._lock = threading.Lock()
        self._beating: threading.Event | None = None
        self._key = int.from_bytes(hashlib.blake2b(f"fp8watch:{name}".encode(), digest_size=8).digest(), "big") >> 1
        self._conn: Connection | None = None

    def held(self) -> bool:
        """Whether this process leads; tries to become the leader.

        Raises:
            SQLAlchemyError: the database cannot be asked.
        """
        if self._own is None:
            return True
        with self._lock:
            return self._held(self._own)

    def _held(self, own: Engine) -> bool:
        try:
            if self._conn is not None:
                self._conn.execute(sa.text("SELECT 1"))  # the advisory lock lives as long as this connection
                return True
            conn = own.connect()
            try:
                lease_session(conn)
                mine = bool(conn.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": self._key}).scalar())
            except BaseException:
                conn.close()
                raise
            if not mine:
                conn.close()
                return False
            self._conn = conn
        except SQLAlchemyError:
            self._drop()
            raise
        self._beating = threading.Event()
        threading.Thread(target=self._beat, args=(conn, self._beating), name="fp8watch-lease", daemon=True).start()
        return True

    def _beat(self, conn: Connection, ended: threading.Event) -> None:
        """Keep the session from falling silent while one round takes long."""
        while not ended.wait(BEAT_S):
            with self._lock:
                if self._conn is not conn:
                    return
                try:
                    conn.execute(sa.text("SELECT 1"))
                except SQLAlchemyError:  # `held` says so at the next round
                    return

    def release(self) -> None:
        """Give up leadership."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._beating is not None:
            self._beating.set()
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(SQLAlchemyError):
                conn.close()
