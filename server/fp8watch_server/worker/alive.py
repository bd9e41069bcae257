"""`python -m fp8watch_server.worker.alive`: whether the worker of this machine holds its lease; for health checks of containers.

Thread:     main

It asks the database that FP8WATCH_DATABASE_URL names. A container has a host name of its own, and one worker.
"""

from __future__ import annotations

import socket
import sys

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db.dialect import engine_of
from fp8watch_server.settings import SettingError, Settings

_SESSION = sa.text("SELECT 1 FROM pg_stat_activity WHERE application_name = :name AND datname = current_database()")


def session_name() -> str:
    """What the database session of a worker's lease is called; PostgreSQL cuts names at 63 bytes."""
    return f"fp8watch worker {socket.gethostname()}"[:63]


def main() -> int:
    """Exit status 0: it does. 1: it does not, with the reason."""
    try:
        with engine_of(Settings.from_environ().database_url) as engine, engine.connect() as conn:
            there = conn.execute(_SESSION, {"name": session_name()}).first() is not None
    except (SQLAlchemyError, SettingError) as e:
        print(str(e).splitlines()[0], file=sys.stderr)
        return 1
    if not there:
        print(f"no session {session_name()!r} in the database: the worker waits or hangs", file=sys.stderr)
    return int(not there)


if __name__ == "__main__":
    sys.exit(main())
