"""What differs between databases, and nothing else: connecting, writing, upserts, JSON.

Upstream:   fp8watch_server.settings    Downstream: fp8watch_server.store.schema, fp8watch_server.store.write
Shapes:     a database URL -> one SQLAlchemy Engine
Thread:     any

SQLite runs in WAL with one writer at a time. sqlite3's own way of beginning transactions is switched off, because it
begins late and then fails where a reader becomes a writer; `writing()` begins at once and waits its turn in line.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError
from sqlalchemy.types import TypeDecorator, TypeEngine

from .turns import Turns

BUSY_TIMEOUT_S = 0.9
"""How long one waits for another writer: under a second, because an agent is answered within one."""

_WRITE_OPTION = "fp8watch_write"


def finite_json(value: Any) -> Any:
    """The same value with NaN, Inf and −Inf as the strings "nan", "inf" and "-inf": JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): finite_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(v) for v in value]
    return value


class Json(TypeDecorator[Any]):
    """JSON that survives non-finite numbers; JSONB on PostgreSQL."""

    impl = sa.JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """Binary JSON where there is one."""
        kind: TypeEngine[Any] = postgresql.JSONB() if dialect.name == "postgresql" else sa.JSON()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """On the way in."""
        return finite_json(value)


class DatabaseUrlError(ValueError):
    """A database URL that cannot work: value, rule, remedy."""


def parse_url(text: str) -> URL:
    """Check a database URL.

    Raises:
        DatabaseUrlError: not a URL, an unknown database, or an SQLite database that lives in memory.
    """
    remedy = "use sqlite:////absolute/path/fp8watch.db or postgresql+psycopg://user@host/name"
    try:
        url = make_url(text)
    except ArgumentError as e:
        raise DatabaseUrlError(f"database URL {text!r} is not a URL; {remedy}") from e
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise DatabaseUrlError(
            f"database URL names {url.get_backend_name()!r}; sqlite and postgresql are known; {remedy}"
        )
    if url.get_backend_name() == "sqlite" and (not url.database or url.database == ":memory:"):
        raise DatabaseUrlError(f"an SQLite database in memory is seen by one connection only; {remedy}")
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def make_engine(database_url: str) -> Engine:
    """One engine of a process. Nothing is opened yet, but the folder of an SQLite file is made.

    Raises:
        DatabaseUrlError: for a URL that cannot work, or a driver that is not installed.
    """
    url = parse_url(database_url)
    if url.get_backend_name() != "sqlite":
        try:
            return sa.create_engine(url, pool_pre_ping=True, pool_timeout=BUSY_TIMEOUT_S, pool_size=8, max_overflow=8)
        except (ModuleNotFoundError, NoSuchModuleError) as e:
            raise DatabaseUrlError(
                f"database URL {url.render_as_string()!r} needs a driver that is not here ({e}); "
                "pip install 'psycopg[binary]'"
            ) from e
    try:
        Path(str(url.database)).resolve().parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DatabaseUrlError(f"the folder of database {url.database!r} cannot be made ({e}); choose another") from e
    engine = sa.create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_timeout=BUSY_TIMEOUT_S * 5,
        pool_size=8,
        max_overflow=48,
    )
    sa.event.listen(engine, "connect", _sqlite_connect)
    sa.event.listen(engine, "begin", _sqlite_begin)
    return engine


def _sqlite_connect(dbapi_connection: Any, record: Any) -> None:
    dbapi_connection.isolation_level = None  # no BEGIN behind our back
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # 200 means committed, also when the power goes
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    cursor.close()


def _sqlite_begin(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get(_WRITE_OPTION) else "BEGIN")


def for_writing(engine: Engine) -> Engine:
    """The same engine and pool, whose transactions take the right to write when they begin."""
    return engine.execution_options(**{_WRITE_OPTION: True})


_LOCKS: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class WriterBusy(OperationalError):
    """Nobody let us write in time."""

    def __init__(self) -> None:
        super().__init__("BEGIN", None, Exception(f"no turn to write within {BUSY_TIMEOUT_S} s"))


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One write transaction: committed when the block ends, undone when it raises.

    On SQLite the writers of this process stand in line here, which is fairer and quicker than SQLite's polling.

    Raises:
        WriterBusy: no turn within BUSY_TIMEOUT_S (an OperationalError, as when the database itself is busy).
    """
    if engine.dialect.name != "sqlite":
        with engine.begin() as conn:
            yield conn
        return
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(engine.pool, Turns())
    if not lock.acquire(BUSY_TIMEOUT_S):
        raise WriterBusy
    try:
        with for_writing(engine).begin() as conn:
            yield conn
    finally:
        lock.release()


def upsert(
    conn: Connection,
    table: sa.Table,
    rows: Sequence[dict[str, Any]],
    *,
    update: Sequence[str] | None = None,
    newest_by: str | None = None,
) -> None:
    """Insert rows; where the primary key exists, set the columns of `update` (None: all others; (): leave the row).

    `newest_by` names a column that must not go back: an older row leaves the one that is there as it is.
    """
    if not rows:
        return
    keys = [c.name for c in table.primary_key.columns]
    names = [n for n in rows[0] if n not in keys] if update is None else list(update)
    dialect = postgresql if conn.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    if names:
        not_older = None if newest_by is None else statement.excluded[newest_by] >= table.c[newest_by]
        statement = statement.on_conflict_do_update(
            index_elements=keys, set_={n: statement.excluded[n] for n in names}, where=not_older
        )
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    conn.execute(statement, list(rows))
