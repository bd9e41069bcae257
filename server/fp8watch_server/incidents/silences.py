"""Silences: messages that people have muted for a while.

Shapes:     (run, mode, module) -> the silences that cover it
Thread:     any, inside a transaction

A silence names a run, a mode and a module, each exactly or by a pattern (`llama-*`, `layers.*.mlp.*`; not a regular
expression, which could keep the detectors busy for ever), and '' covers everything. Incidents are kept all the same.
"""

from __future__ import annotations

import fnmatch
from typing import cast

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import upsert, writing
from fp8watch_server.store.rows import SilenceRow


def silences_of(conn: sa.Connection, tenant: str, run_id: str, mode: str, module: str, now: float) -> list[SilenceRow]:
    """Silences that cover an incident now, the longest first."""
    t = schema.silence
    rows = conn.execute(
        sa.select(t).where(t.c.tenant == tenant, t.c.expires_at > now).order_by(t.c.expires_at.desc())
    ).mappings()
    wanted = {"run_id": run_id, "mode": mode, "module": module}
    return [cast(SilenceRow, dict(row)) for row in rows if all(covers(row[name], v) for name, v in wanted.items())]


def covers(pattern: str, value: str) -> bool:
    """Whether a field of a silence matches a value."""
    return pattern in ("", value) or fnmatch.fnmatchcase(value, pattern)


def copy_silences(home: sa.Engine, shard: sa.Engine, now: float) -> None:
    """Give a shard the silences that have not run out: it may have been added, or away, since they were made."""
    t = schema.silence
    with home.connect() as conn:
        rows = [dict(row) for row in conn.execute(sa.select(t).where(t.c.expires_at > now)).mappings()]
    if rows:
        with writing(shard) as conn:
            upsert(conn, t, rows, update=())
