"""A bell in the database: whoever commits a batch that cannot wait rings it, and whoever detects there hears it at once.

Shapes:     run ids -> LISTEN and NOTIFY of PostgreSQL
Thread:     committers ring; a thread of its own listens

Workers and other collectors commit what a collector detects, and it would look for that once a second. A ring that nobody
hears, as behind a pooler that cannot LISTEN, costs that second and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

log = logging.getLogger("fp8watch.collector")

CHANNEL = "fp8watch_urgent"
HEAR_S, RETRY_S = 1.0, 0.2


def ring(conn: Connection, run_ids: Iterable[str]) -> None:
    """Tell of these runs when the caller's transaction commits."""
    if conn.dialect.name == "postgresql":
        for run_id in sorted(set(run_ids)):
            conn.execute(sa.text("SELECT pg_notify(:channel, :run)"), {"channel": CHANNEL, "run": run_id})


class Bell:
    """Listens, where the database is a PostgreSQL.

    Args:
        engine: the database.
        heard: is told the run, from the thread of the bell.
        listens: is called whenever it begins to listen; what rang before was not heard.
    """

    def __init__(
        self, engine: Engine, heard: Callable[[str], None], listens: Callable[[], None] = lambda: None
    ) -> None:
        self._own = sa.create_engine(engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        self._heard, self._listens = heard, listens
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._own.dialect.name == "postgresql":
            self._thread = threading.Thread(target=self._listen, name="fp8watch-bell", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(HEAR_S + 1)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                with self._own.connect() as conn:
                    conn.exec_driver_sql("LISTEN fp8watch_urgent")  # CHANNEL
                    self._listens()
                    session: Any = conn.connection.driver_connection
                    while not self._stop.is_set():
                        for told in session.notifies(timeout=HEAR_S):
                            self._heard(told.payload)
                            if self._stop.is_set():
                                break
            except Exception as e:  # noqa: BLE001  the database is away; detection looks by itself
                log.debug("the bell cannot be heard: %s", e)
            self._stop.wait(RETRY_S)
