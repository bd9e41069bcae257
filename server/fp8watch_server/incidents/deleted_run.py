"""A run is deleted: what was told of it is over, or receivers would show it for ever.

Shapes:     run -> its rows are gone; a resolved notice of each incident that was told and is not over
Thread:     query pool, main; inside one write transaction
"""

from __future__ import annotations

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.incidents.messages import write_resolved


def delete_run(
    conn: sa.Connection, run_id: str, now: float, public_url: str, *, tenant: str = schema.DEFAULT_TENANT
) -> bool:
    """Delete a run with everything that belongs to it but its notices. False where there is none."""
    t, r = schema.incident, schema.run.c
    unresolved = (t.c.run_id == run_id, t.c.tenant == tenant, t.c.status != "resolved")
    rows = conn.execute(sa.select(t).where(*unresolved).order_by(t.c.id).with_for_update()).mappings().all()
    over = {"status": "resolved", "resolved_at": now, "updated_at": now}
    # they stay as they are until they are gone: the end of a critical one would send what it holds back
    for row in rows:
        write_resolved(conn, {**row, **over}, now, public_url)
    return conn.execute(sa.delete(schema.run).where(r.run_id == run_id, r.tenant == tenant)).rowcount > 0
