"""Statistics of PostgreSQL's planner for tables that grow within seconds, made before autovacuum comes round.

Shapes:     tables that have grown fourfold -> ANALYZE
Thread:     detect worker; on PostgreSQL only

Ten thousand ranks register within a minute. Until their table is analysed the planner takes a run for a few rows, and a session or
a batch may be looked up among all of its run: what should cost the same for each rank then grows with their number.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing

LOOK_EVERY_S = 5.0
MIN_ROWS = 200
GROWN = 4
TABLES = (t.session, t.hot_batch, t.scalar)

_GREW = sa.text(
    "SELECT s.relname FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid "
    "WHERE s.relname = ANY(:names) AND s.n_live_tup >= :least AND s.n_live_tup > :grown * greatest(c.reltuples, 0)"
)


class PlannerStatistics:
    """Of one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looked_at = 0.0

    def renew(self) -> list[str]:
        """Analyse what has grown since it was analysed last; names of these tables. Looks at most every few seconds."""
        if self._engine.dialect.name != "postgresql" or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at = time.monotonic()
        names = [table.name for table in TABLES]
        with self._engine.connect() as conn:
            grew = list(conn.execute(_GREW, {"names": names, "least": MIN_ROWS, "grown": GROWN}).scalars())
        for name in grew:
            with writing(self._engine) as conn:
                conn.exec_driver_sql(f'ANALYZE "{name}"')
        return grew
