"""Migrations, shipped inside the package and run by the program: nobody needs an alembic.ini.

Thread:     start of the process
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError

from fp8watch_server.db import row_security
from fp8watch_server.db.dialect import for_writing

log = logging.getLogger("fp8watch.collector")

BRIEFLY_LOCKED = frozenset({"55P03", "40P01"})
"""SQLSTATEs of a table that others hold: no lock in time, and a deadlock."""
LOCK_MS = 1000
"""How long what others ask of a table waits behind a migration that waits for it."""
AGAIN_AFTER_S, PATIENCE_S = 0.5, 60.0
_LOCK = 0x66703877  # of the migrations of one database: "fp8w"


class UnknownRevision(RuntimeError):
    """The database was written by a newer collector, or by one from before the first release."""


def config() -> Config:
    """Alembic's configuration of this package."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return made


def current(conn: Connection) -> str | None:
    """Revision of a database; None when it is empty."""
    return MigrationContext.configure(conn).get_current_revision()


@lru_cache(maxsize=1)
def head() -> str:
    """Revision of this collector."""
    found = ScriptDirectory.from_config(config()).get_current_head()
    assert found is not None
    return found


def upgrade(engine: Engine) -> str | None:
    """Bring a database to the revision of this collector, in one transaction; nothing where it is there already.

    On PostgreSQL it is begun again for as long as PATIENCE_S while a table that it changes is in use.

    Returns:
        The revision it came from, or None.

    Raises:
        UnknownRevision: its revision is not one that this collector knows.
        sqlalchemy.exc.OperationalError: the database is away, or a table is in use all the time.
    """
    with engine.connect() as conn:
        before = current(conn)
    if before == head():
        return before
    until, said = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            with for_writing(engine).begin() as conn:
                return _upgrade(conn)
        except OperationalError as e:
            if getattr(e.orig, "sqlstate", None) not in BRIEFLY_LOCKED or time.monotonic() > until:
                raise
            if not said:
                log.warning("a table is in use; the database is brought to this version as soon as it is free")
            said = True
            time.sleep(AGAIN_AFTER_S)


def _upgrade(conn: Connection) -> str | None:
    """In one transaction, as the only one: others that start at the same time wait for its end, and find it done."""
    if conn.dialect.name == "postgresql":
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        conn.execute(sa.select(sa.func.set_config("lock_timeout", str(LOCK_MS), True)))
    before = current(conn)
    if before == head():
        return before
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    if before is not None and before not in known:
        raise UnknownRevision(
            f"the database is at revision {before}, which this collector does not know; upgrade the collector, or give it "
            "a new database where this one is from before the first release"
        )
    made = config()
    made.attributes["connection"] = conn
    command.upgrade(made, "head")
    row_security.renew(conn)
    return before
