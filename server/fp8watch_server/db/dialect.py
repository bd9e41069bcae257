"""Everything that differs between SQLite and PostgreSQL: engines, write transactions, upserts, JSON and array types.

Shapes:     a database URL -> one SQLAlchemy Engine
Thread:     any

SQLite runs in WAL mode with one writer at a time. sqlite3's implicit transactions are switched off, because they begin
late and then fail when a reader becomes a writer; `writing()` begins immediately and waits for its turn in a FIFO
queue.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from fp8watch_server.db.closing_pool import ClosingPool
from fp8watch_server.db.fair_lock import FairLock

BUSY_TIMEOUT_S = 0.9
"""Wait for the write lock: under a second, because an agent is answered within one."""

CONNECT_S, SILENT_S = 2, 3
"""How long a connection to PostgreSQL may take to open, and how long its other end may be silent: a host that is gone sends no
word of it, and TCP alone waits for minutes, or for hours where nothing is under way."""

NUM_CONNECTIONS = 16
"""Of one pool to a PostgreSQL; db.pools has a second one for requests."""

_WRITE_OPTION = "fp8watch_write"


def finite_json(value: Any) -> Any:
    """The same value with NaN, Inf and −Inf as the strings "nan", "inf" and "-inf", which JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): finite_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(v) for v in value]
    return value


class Json(TypeDecorator[Any]):
    """JSON column type that preserves non-finite numbers; JSONB on PostgreSQL."""

    impl = sa.JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """JSONB on PostgreSQL, else JSON."""
        kind: TypeEngine[Any] = postgresql.JSONB() if dialect.name == "postgresql" else sa.JSON()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """Encode non-finite numbers."""
        return finite_json(value)


_ARRAY_DTYPES = {"REAL": (">f4", 700), "BIGINT": (">i8", 20)}


@dataclass(frozen=True)
class PgArray:
    """A one-dimensional PostgreSQL array in its binary format, built by numpy: a list would cost 50 times as much."""

    kind: str
    wire: bytes


def pg_array(kind: str, values: npt.NDArray[Any], present: npt.NDArray[np.bool_] | None = None) -> PgArray:
    """An array of REAL or BIGINT, NULL where not `present`."""
    dtype, oid = _ARRAY_DTYPES[kind]
    n = len(values)
    width = np.dtype(dtype).itemsize
    items = np.empty(n, dtype=[("bytes", ">i4"), ("value", dtype)])
    items["bytes"], items["value"] = width, values
    head = struct.pack(">iiI", 1, int(present is not None and not present.all()), oid) + struct.pack(">ii", n, 1)
    if present is None or present.all():
        return PgArray(kind, head + items.tobytes())
    raw = items.view(np.uint8).reshape(n, width + 4)
    raw[~present, :4] = 0xFF  # a length of −1 means NULL, and no value follows
    keep = np.ones((n, width + 4), dtype=bool)
    keep[~present, 4:] = False
    return PgArray(kind, head + raw[keep].tobytes())


def pg_arrays(
    kind: str, values: npt.NDArray[Any], present: npt.NDArray[np.bool_], starts: Any, ends: Any
) -> list[PgArray]:
    """An array of each slice of some values, as `pg_array`; what is the same for all of them is done once."""
    dtype, oid = _ARRAY_DTYPES[kind]
    width = np.dtype(dtype).itemsize
    items = np.empty(len(values), dtype=[("bytes", ">i4"), ("value", dtype)])
    items["bytes"], items["value"] = width, values
    raw, head = items.tobytes(), struct.pack(">iiI", 1, 0, oid)
    whole = np.logical_and.reduceat(present, starts).tolist()
    each = width + 4
    return [
        PgArray(kind, head + struct.pack(">ii", end - start, 1) + raw[start * each : end * each])
        if of_slice
        else pg_array(kind, values[start:end], present[start:end])
        for start, end, of_slice in zip(starts.tolist(), ends.tolist(), whole, strict=True)
    ]


class _PgArrayType(UserDefinedType[Any]):
    cache_ok = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def get_col_spec(self, **kw: Any) -> str:
        """The SQL type name."""
        return f"{self.kind}[]"


class SqlArray(TypeDecorator[Any]):
    """A native array on PostgreSQL, for Grafana to unnest; NULL elsewhere: packed bytes hold the same numbers."""

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """REAL[] or BIGINT[] on PostgreSQL."""
        kind: TypeEngine[Any] = _PgArrayType(self.kind) if dialect.name == "postgresql" else sa.LargeBinary()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """Convert (values, present), an array that is made, or None."""
        if value is None or dialect.name != "postgresql":
            return None
        if isinstance(value, PgArray):
            return value
        return pg_array(self.kind, *value)


class DatabaseUrlError(ValueError):
    """An unusable database URL: value, rule, remedy."""


def parse_url(text: str) -> URL:
    """Validate a database URL.

    Raises:
        DatabaseUrlError: not a URL, an unknown database, or an SQLite database that lives in memory.
    """
    remedy = "use sqlite:////absolute/path/fp8watch.db or postgresql+psycopg://user@host/name"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the latter of a port; both repeat what was given, with its password
        shown = text.partition(":")[0] if ":" in text else text.partition("@")[2] or text
        raise DatabaseUrlError(f"database URL {shown[:40]!r}… is not a URL; {remedy}") from None
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
    """Create the engine of a process. No connection is opened yet, but the folder of an SQLite file is created.

    Raises:
        DatabaseUrlError: for a URL that cannot work, or a driver that is not installed.
    """
    url = parse_url(database_url)
    if url.get_backend_name() != "sqlite":
        try:
            return postgresql_engine(url)
        except (ModuleNotFoundError, NoSuchModuleError) as e:
            raise DatabaseUrlError(
                f"database URL {url.render_as_string()!r} needs a driver that is not here ({e}); "
                "pip install 'psycopg[binary]'"
            ) from e
    try:
        file = Path(str(url.database)).resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # there already, or SQLite says what is wrong
            if not str(url.database).startswith("file:"):
                make_private(file)
    except OSError as e:
        raise DatabaseUrlError(f"the folder of database {url.database!r} cannot be made ({e}); choose another") from e
    engine = sa.create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        poolclass=ClosingPool,
        pool_timeout=BUSY_TIMEOUT_S * 5,
        pool_size=8,
        max_overflow=48,
    )
    sa.event.listen(engine, "connect", _sqlite_connect)
    sa.event.listen(engine, "begin", _sqlite_begin)
    return engine


def make_private(file: Path) -> None:
    """Make an empty file that its owner alone may read: SQLite gives its mode to the files beside it.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


@contextmanager
def engine_of(database_url: str, must_exist: bool = False) -> Iterator[Engine]:
    """`make_engine` as a context manager that disposes of the engine.

    Raises:
        DatabaseUrlError: as `make_engine`; with `must_exist` also where an SQLite file is not there, and none is made.
    """
    url = parse_url(database_url)
    if must_exist and url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise DatabaseUrlError(f"database {url.database!r} is not there; name another with --database-url")
    engine = make_engine(database_url)
    try:
        yield engine
    finally:
        engine.dispose()


def postgresql_engine(url: URL, *, pool_timeout_s: float = BUSY_TIMEOUT_S) -> Engine:
    """An engine with a pool of NUM_CONNECTIONS, each of which is waited for as long as `pool_timeout_s`."""
    from psycopg.adapt import Buffer, Dumper
    from psycopg.pq import Format

    class _Dumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: Any) -> Buffer | None:
            wire: bytes = obj.wire
            return wire

    # a reader runs several queries that must see one snapshot; writers see what others commit
    engine = sa.create_engine(
        _impatient(url),
        poolclass=ClosingPool,
        pool_pre_ping=True,
        pool_timeout=pool_timeout_s,
        pool_size=NUM_CONNECTIONS // 2,
        max_overflow=NUM_CONNECTIONS - NUM_CONNECTIONS // 2,
        isolation_level="REPEATABLE READ",
    )

    def adapt(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.adapters.register_dumper(PgArray, _Dumper)

    sa.event.listen(engine, "connect", adapt)
    sa.event.listen(engine, "handle_error", _takes_no_changes)
    return engine


def _impatient(url: URL) -> URL:
    """With timeouts of libpq, where the URL has none."""
    given = {"connect_timeout": CONNECT_S, "tcp_user_timeout": SILENT_S * 1000}
    given |= {"keepalives_idle": SILENT_S, "keepalives_interval": 1, "keepalives_count": SILENT_S}
    return url.update_query_dict({key: str(value) for key, value in given.items() if key not in url.query})


def _takes_no_changes(context: sa.ExceptionContext) -> None:
    """A server that takes no changes is as good as away: another connection may reach one that does, as behind a failover."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY_TRANSACTION:
        context.is_disconnect = True


def _sqlite_connect(dbapi_connection: Any, record: Any) -> None:
    dbapi_connection.isolation_level = None  # no implicit BEGIN
    cursor = dbapi_connection.cursor()

    cursor.execute("PRAGMA page_size=2048")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # 200 means committed, even after a power failure
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    cursor.close()


def _sqlite_begin(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get(_WRITE_OPTION) else "BEGIN")


def for_writing(engine: Engine) -> Engine:
    """The same engine and pool, with transactions that take the write lock at once."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="READ COMMITTED")
    return engine.execution_options(**{_WRITE_OPTION: True})


OF_THE_VALUES = (DataError, IntegrityError)
"""What a database refuses because of what is to be written. Anything else is about the database: it is away, read-only, or lacks
a right or a table."""

_READ_ONLY_TRANSACTION = "25006"

_LOCKS: weakref.WeakKeyDictionary[Any, FairLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class WriterBusy(OperationalError):
    """The write lock was not free in time."""

    def __init__(self, turn_s: float = BUSY_TIMEOUT_S) -> None:
        super().__init__("BEGIN", None, Exception(f"no turn to write within {turn_s:g} s"))


@contextmanager
def writing(engine: Engine, turn_s: float | None = None) -> Iterator[Connection]:
    """One write transaction: committed when the block ends, rolled back when it raises.

    On SQLite the writers of this process queue here, which is fairer and faster than SQLite's polling.

    Raises:
        WriterBusy: no turn within `turn_s` seconds, or BUSY_TIMEOUT_S (an OperationalError, as when the database itself is busy).
    """
    if engine.dialect.name != "sqlite":
        with for_writing(engine).begin() as conn:
            yield conn
        return
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(engine.pool, FairLock())
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
    """Insert rows; where the primary key exists, set the columns of `update` (None: all others; (): keep the row).

    `newest_by` names a column that must not decrease: an older row leaves the existing one unchanged.
    """
    if not rows:
        return
    names = tuple(rows[0]) if update is None else tuple(update)
    conn.execute(_upsert(conn.dialect.name, table, names, newest_by), list(rows))


@lru_cache(maxsize=256)
def _upsert(dialect_name: str, table: sa.Table, names: tuple[str, ...], newest_by: str | None) -> Any:
    """Build (and cache) the statement; building it costs more than executing it."""
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
