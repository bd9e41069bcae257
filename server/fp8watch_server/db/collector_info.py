"""Collector facts in the database, for SQL to read (such as its public URL).

Shapes:     a name and a text -> one row
Thread:     start of the process
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing

PUBLIC_URL = "public_url"


def publish(engine: Engine, name: str, value: str) -> None:
    """Store a value unless it is already there; of several collectors the most recently started one wins."""
    if not value:
        return
    with engine.connect() as conn:
        if conn.execute(sa.select(t.fact.c.value).where(t.fact.c.name == name)).scalar() == value:
            return
    with writing(engine) as conn:
        upsert(conn, t.fact, [{"name": name, "value": value}])
