"""The newest values of everything that was given to watch.log: name by name, by the keys of the table alone.

Shapes:     run -> name -> series of its last steps, as queries.scalars gives it
Thread:     any

The table has a row a value, so a run of a million steps has millions: names are found one after the other (the next name
above the last), and of each only the newest steps of one rank are read.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.fields import NAMES_OF_CLASS


def names(conn: Connection, run_id: str, at_most: int, tenant: str = t.DEFAULT_TENANT) -> tuple[list[str], bool]:
    """(names that a run has logged, in their order; whether there are more)."""
    c = t.logged.c
    out: list[str] = []
    while len(out) <= at_most:
        where = [c.run_id == run_id, c.tenant == tenant, *([c.name > out[-1]] if out else [])]
        name = conn.execute(sa.select(c.name).where(*where).order_by(c.name).limit(1)).scalar()
        if name is None:
            return out, False
        out.append(str(name))
    return out[:at_most], True


def newest(
    conn: Connection, run_id: str, name: str, last_step: int, num_steps: int, tenant: str = t.DEFAULT_TENANT
) -> dict[str, Any]:
    """The last values of a name up to a step, by the first rank of the newest attempt that logged it.

    Args:
        num_steps: steps that are looked at, back from the last one.
    """
    c = t.logged.c
    of_name = [c.run_id == run_id, c.tenant == tenant, c.name == name]
    attempt = conn.execute(sa.select(sa.func.max(c.attempt)).where(*of_name)).scalar()
    rank = conn.execute(sa.select(sa.func.min(c.rank)).where(*of_name, c.attempt == attempt)).scalar()
    where = [*of_name, c.attempt == attempt, c.rank == rank, c.step > last_step - num_steps, c.step <= last_step]
    rows = conn.execute(sa.select(c.step, c.value, c.value_class).where(*where).order_by(c.step)).all()
    return {
        "steps": [int(r.step) for r in rows],
        "values": [None if r.value_class else r.value for r in rows],
        "nonfinite": [[i, NAMES_OF_CLASS[r.value_class]] for i, r in enumerate(rows) if r.value_class],
        "stride": 1,
    }
