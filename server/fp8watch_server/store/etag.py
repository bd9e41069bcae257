"""ETags from the versions of everything a query reads; and the steps of a time span.

Shapes:     a run and a range of steps -> a short text that changes with what lies in it
Thread:     query pool
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.reading import extent


def validator(conn: Connection, run_id: str, from_step: int | None, to_step: int | None, *asked: str) -> str:
    """ETag over the blocks, hot batches and sites that a query may read, and its parameters. Reads no block.

    For cooled steps only a late batch, or retention, changes it.
    """
    found = extent(conn, run_id, from_step, to_step)
    s, r = t.site.c, t.run.c
    sites = conn.execute(
        sa.select(sa.func.count(), sa.func.max(s.updated_at)).where(s.run_id == run_id, s.tenant == found.tenant)
    ).one()
    made_at = conn.execute(sa.select(r.created_at).where(r.run_id == run_id, r.tenant == found.tenant)).scalar()
    cells = [cell for of_key in found.closed.values() for cell in of_key] + found.open
    parts = [*asked, repr(made_at), repr(tuple(sites))]
    parts += [f"{cell.step0}:{cell.revision}" for cell in sorted(cells, key=lambda cell: int(cell.step0))]
    parts += [f"{row.arrival}:{row.step_min}" for row in found.hot]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def steps_between(
    conn: Connection, run_id: str, since: float | None, until: float | None, *, tenant: str = t.DEFAULT_TENANT
) -> tuple[int, int] | None:
    """First and last step that a run took between two times (seconds since 1970), or None."""
    c = t.scalar.c
    where = [c.run_id == run_id, c.tenant == tenant]
    if since is not None:
        where.append(c.time >= since)
    if until is not None:
        where.append(c.time <= until)
    first, last = conn.execute(sa.select(sa.func.min(c.step), sa.func.max(c.step)).where(*where)).one()
    return None if first is None else (int(first), int(last))
