"""Leader election among collectors on one database: one runs the detectors, one compacts.

Shapes:     (engine, what for) -> whether it is us
Thread:     the one that works

On PostgreSQL it is an advisory lock, held by a dedicated connection, so a collector that dies releases it at once.
SQLite has one collector, which always leads. Leadership only saves work and is no safety mechanism: what the leader
writes must be safe even if two believe that they lead.
"""

from __future__ import annotations

import contextlib
import hashlib

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError


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
        self._key = int.from_bytes(hashlib.blake2b(f"fp8watch:{name}".encode(), digest_size=8).digest(), "big") >> 1
        self._conn: Connection | None = None

    def held(self) -> bool:
        """Whether this process leads; tries to become the leader.

        Raises:
            SQLAlchemyError: the database cannot be asked.
        """
        if self._own is None:
            return True
        try:
            if self._conn is not None:
                self._conn.execute(sa.text("SELECT 1"))  # the advisory lock lives as long as this connection
                return True
            conn = self._own.connect()
            try:
                mine = bool(conn.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": self._key}).scalar())
            except BaseException:
                conn.close()
                raise
            if not mine:
                conn.close()
                return False
            self._conn = conn
        except SQLAlchemyError:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Give up leadership."""
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(SQLAlchemyError):
                conn.close()
