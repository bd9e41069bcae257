"""Migrations, shipped inside the package and run by the program: nobody needs an alembic.ini.

Thread:     start of the process
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import row_security
from fp8watch_server.db.dialect import for_writing


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

    Returns:
        The revision it came from, or None.

    Raises:
        UnknownRevision: its revision is not one that this collector knows.
    """
    with engine.connect() as conn:
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
    with for_writing(engine).begin() as conn:
        made.attributes["connection"] = conn
        command.upgrade(made, "head")
        row_security.renew(conn)
    return before
