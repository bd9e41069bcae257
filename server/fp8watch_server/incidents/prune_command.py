"""`fp8watch prune`: with --delete, what was told of the run is told as over.

Thread:     main
"""

from __future__ import annotations

import time

import sqlalchemy as sa

from fp8watch_server.incidents.deleted_run import delete_run
from fp8watch_server.settings import Settings
from fp8watch_server.store import command


def main(argv: list[str]) -> int:
    """Apply retention now, or delete a run. Exit status 0: done."""
    return command.prune_main(argv, _delete)


def _delete(conn: sa.Connection, run_id: str, settings: Settings) -> None:
    delete_run(conn, run_id, time.time(), settings.public_url)
