"""What differs between databases, and nothing else: connecting, writing, upserts, JSON.

Upstream:   fp8watch_server.settings    Downstream: fp8watch_server.db.metadata, fp8watch_server.store.registrations
Shapes:     a database URL -> one SQLAlchemy Engine
Thread:     any

SQLite runs in WAL with one writer at a time. sqlite3's own way of beginning transactions is switched off, because it
begins late and then fails where a reader becomes a writer; `writing()` begins at once and waits its turn in line.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from fp8watch_server.db.fair_lock import Turns

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


_ARRAY_DTYPES = {"REAL": (">f4", 700), "BIGINT": (">i8", 20)}


@dataclass(frozen=True)
class PgArray:
    """Bytes of a one-dimensional PostgreSQL array in its binary form, made by numpy: a list would cost 50 times."""

    kind: str
    wire: bytes


def pg_array(kind: str, values: npt.NDArray[Any], present: npt.NDArray[np.bool_] | None = None) -> PgArray:
    """An array of REAL or BIGINT; where not `present`, NULL."""
    dtype, oid = _ARRAY_DTYPES[kind]
    n = len(values)
    width = np.dtype(dtype).itemsize
    items = np.empty(n, dtype=[("bytes", ">i4"), ("value", dtype)])
    items["bytes"], items["value"] = width, values
    head = struct.pack(">iiI", 1, int(present is not None and not present.all()), oid) + struct.pack(">ii", n, 1)
    if present is None or present.all():
        return PgArray(kind, head + items.tobytes())
    raw = items.view(np.uint8).reshape(n, width + 4)
    raw[~present, :4] = 0xFF  # a length of −1 is NULL, and no value follows
    keep = np.ones((n, width + 4), dtype=bool)
    keep[~present, 4:] = False
    return PgArray(kind, head + raw[keep].tobytes())


class _PgArrayType(UserDefinedType[Any]):
    cache_ok = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def get_col_spec(self, **kw: Any) -> str:
        """As SQL says it."""
        return f"{self.kind}[]"


class SqlArray(TypeDecorator[Any]):
    """A native array on PostgreSQL, for Grafana to unnest; nothing elsewhere: the same numbers are in packed bytes."""

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """REAL[] or BIGINT[] where there are arrays."""
        kind: TypeEngine[Any] = _PgArrayType(self.kind) if dialect.name == "postgresql" else sa.LargeBinary()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """(values, present) or None on the way in."""
        if value is None or dialect.name != "postgresql":
            return None
        return pg_array(self.kind, *value)


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
            return _postgresql(url)
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


@contextmanager
def engine_of(database_url: str) -> Iterator[Engine]:
    """`make_engine` for one command: all connections are closed afterwards, whatever happens."""
    engine = make_engine(database_url)
    try:
        yield engine
    finally:
        engine.dispose()


def _postgresql(url: URL) -> Engine:
    from psycopg.adapt import Buffer, Dumper
    from psycopg.pq import Format

    class _Dumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: Any) -> Buffer | None:
            wire: bytes = obj.wire
            return wire

    # a reader asks several questions, and all of them must be about one moment; writers see what others commit
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_timeout=BUSY_TIMEOUT_S,
        pool_size=8,
        max_overflow=8,
        isolation_level="REPEATABLE READ",
    )

    def adapt(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.adapters.register_dumper(PgArray, _Dumper)

    sa.event.listen(engine, "connect", adapt)
    return engine


def _sqlite_connect(dbapi_connection: Any, record: Any) -> None:
    dbapi_connection.isolation_level = None  # no BEGIN behind our back
    cursor = dbapi_connection.cursor()

    cursor.execute("PRAGMA page_size=2048")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # 200 means committed, also when the power goes
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    cursor.close()


def _sqlite_begin(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get(_WRITE_OPTION) else "BEGIN")


def for_writing(engine: Engine) -> Engine:
    """The same engine and pool, whose transactions take the right to write when they begin."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="READ COMMITTED")
    return engine.execution_options(**{_WRITE_OPTION: True})


_LOCKS: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class WriterBusy(OperationalError):
    """Nobody let us write in time."""

    def __init__(self, turn_s: float = BUSY_TIMEOUT_S) -> None:
        super().__init__("BEGIN", None, Exception(f"no turn to write within {turn_s:g} s"))


@contextmanager
def writing(engine: Engine, turn_s: float | None = None) -> Iterator[Connection]:
    """One write transaction: committed when the block ends, undone when it raises.

    On SQLite the writers of this process stand in line here, which is fairer and quicker than SQLite's polling.

    Raises:
        WriterBusy: no turn within `turn_s` seconds, or BUSY_TIMEOUT_S (an OperationalError, as when the database itself is busy).
    """
    if engine.dialect.name != "sqlite":
        with for_writing(engine).begin() as conn:
            yield conn
        return
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(engine.pool, Turns())
    turn_s = BUSY_TIMEOUT_S if turn_s is None else turn_s
    if not lock.acquire(turn_s):
        raise WriterBusy(turn_s)
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
    names = tuple(rows[0]) if update is None else tuple(update)
    conn.execute(_upsert(conn.dialect.name, table, names, newest_by), list(rows))


@lru_cache(maxsize=256)
def _upsert(dialect_name: str, table: sa.Table, names: tuple[str, ...], newest_by: str | None) -> Any:
    """The statement; making it costs more than running it."""
    keys = [c.name for c in table.primary_key.columns]
    names = tuple(n for n in names if n not in keys)
    dialect = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(table)
    if names:
        not_older = None if newest_by is None else statement.excluded[newest_by] >= table.c[newest_by]
        statement = statement.on_conflict_do_update(
            index_elements=keys, set_={n: statement.excluded[n] for n in names}, where=not_older
        )
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    return statement
