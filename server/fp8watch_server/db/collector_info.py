"""What the collector says of itself in the database, where SQL can read it.

Upstream:   fp8watch_server.settings    Downstream: fp8watch_server.db.sql_chart_views
Shapes:     a name and a text -> one row
Thread:     start of the process
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing

PUBLIC_URL = "public_url"


def tell(engine: Engine, name: str, value: str) -> None:
    """Write it where it is not there yet; of several collectors on one database the last to start is heard."""
    if not value:
        return
    with engine.connect() as conn:
        if conn.execute(sa.select(t.fact.c.value).where(t.fact.c.name == name)).scalar() == value:
            return
    with writing(engine) as conn:
        upsert(conn, t.fact, [{"name": name, "value": value}])
