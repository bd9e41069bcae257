"""A second pool of connections to a PostgreSQL, for requests: many long questions wait for each other, and ingest, detection and
compaction do not wait for them.

Shapes:     Engine -> Engine over connections of its own
Thread:     any
"""

from __future__ import annotations

import threading
import time
import weakref

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db.dialect import postgresql_engine

LAST_ANSWERS_S = 5.0
"""How long a collector that stops waits for queries whose clients have gone."""
PATIENCE_S = 10.0
"""How long a request that has a thread waits for a connection. Where the database is away, it is answered without it."""

_OF: weakref.WeakKeyDictionary[Engine, Engine] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def for_requests(engine: Engine) -> Engine:
    """The same database over the connections of requests; on SQLite, where a pool has enough for both, the same engine.

    It is disposed of with the engine that it was made for.
    """
    if engine.dialect.name != "postgresql":
        return engine
    with _LOCK:
        found = _OF.get(engine)
        if found is None:
            found = _OF[engine] = postgresql_engine(engine.url, pool_timeout_s=PATIENCE_S)
            of_it = found
            sa.event.listen(engine, "engine_disposed", lambda gone: of_it.dispose())
    return found


def close(engine: Engine, within_s: float = LAST_ANSWERS_S) -> None:
    """Close all connections of an engine that nobody asks any more, and those of its requests.

    A query whose client has gone is answered in its thread all the same: this waits until all have come back, `within_s` at most.
    What comes back later is closed then.
    """
    deadline = time.monotonic() + within_s
    for pool in (engine.pool, for_requests(engine).pool):
        while isinstance(pool, sa.QueuePool) and pool.checkedout() and time.monotonic() < deadline:
            time.sleep(0.005)
    engine.dispose()
