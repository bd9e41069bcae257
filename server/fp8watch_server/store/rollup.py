"""Roll-up of a cell over its ranks, with the rank of each maximum; and the cell's summary.

Shapes:     blocks of all (attempt, rank) of a cell -> blocks of (0, −1), a part of the sites at a time
Thread:     compactor

Until the last part is written, queries merge the cell from its detail; a crash on the way leaves blocks that nobody
reads, and the work is done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import blocks
from fp8watch_server.store.block_codec import short_mantissa
from fp8watch_server.store.compact import (
    ROLLED,
    CellChanged,
    CrashPoint,
    cell_row,
    no_crash,
    put_blocks,
    put_summary,
    read_blocks,
    size_of,
    touch,
)
from fp8watch_server.store.reading import detail_keys, owners
from fp8watch_server.store.records import Parts, newest_of_each, over_ranks, owned
from fp8watch_server.store.scalars import put_scalar_block
from fp8watch_server.store.summary import SUMMARY, summarize

RECORDS_AT_ONCE = 1 << 17
"""Maximum number of records per part, to keep transactions short and memory small."""


def behind(conn: Connection, run_id: str, tenant: str) -> list[int]:
    """First steps of the cells without a roll-up."""
    c = t.cell.c
    return list(
        conn.execute(
            sa.select(c.step0).where(c.run_id == run_id, c.tenant == tenant, c.shown_rank.is_(None)).order_by(c.step0)
        ).scalars()
    )


def roll_up(engine: Engine, run_id: str, tenant: str, step0: int, now: float, *, crash: CrashPoint = no_crash) -> bool:
    """Make the roll-up of a cell and publish it. False: it exists already, or the cell is deleted.

    Raises:
        CellChanged: the cell has changed meanwhile; nothing of what is read was written.
    """
    with engine.connect() as conn:
        cell = cell_row(conn, run_id, tenant, step0)
        if cell is None or cell.shown_rank is not None:
            return False
        keys = detail_keys(cell)
        sites = _sites(conn, cell, keys)
        several = len({attempt for attempt, _ in keys}) > 1
        owner = owners(conn, run_id, tenant, step0, step0 + t.BLOCK_STEPS - 1) if several else None
    merge = len(keys) > 1
    shown = ROLLED if merge else keys[0]
    arrays = engine.dialect.name == "postgresql"
    summaries: list[npt.NDArray[np.void]] = []
    num_bytes = 0
    per_part = max(1, RECORDS_AT_ONCE // (t.BLOCK_STEPS * len(keys)))
    for start in range(0, len(sites), per_part):
        part = sites[start : start + per_part]
        with engine.connect() as conn:
            parts = read_blocks(conn, run_id, tenant, keys, step0, part)
        if merge:
            parts = _merged(parts, owner)
        summaries.append(summarize(parts, step0))
        if merge or arrays:
            encoded = blocks.encode(parts, step0, arrays=arrays)
            num_bytes += size_of(encoded) if merge else 0
            crash("rollup.encoded")
            with writing(engine) as conn:
                _still(conn, cell)
                put_blocks(conn, run_id, tenant, shown, encoded)
                if merge:
                    _drop_others(conn, cell, part, encoded)
                crash("rollup.part")
    summary = np.concatenate(summaries) if summaries else np.zeros(0, dtype=SUMMARY)
    with writing(engine) as conn:
        touch(conn, cell, shown_attempt=shown[0], shown_rank=shown[1], num_bytes=cell.num_bytes + num_bytes)
        put_summary(conn, run_id, tenant, step0, summary)
        put_scalar_block(conn, run_id, tenant, step0)
        crash("rollup.shown")
    crash("rollup.committed")
    return True


def _merged(parts: Parts, owner: dict[tuple[int, int], int] | None) -> Parts:
    whole = owned(newest_of_each(parts), owner)
    rolled = over_ranks(blocks.with_ranks(whole))
    n = len(rolled)
    columns = {
        name: short_mantissa(values) if values.dtype == np.float64 else values
        for name, values in rolled.columns.items()
    }
    none = np.zeros(n, dtype=np.int64)
    return Parts(rolled.site, rolled.step, none + t.ROLLED_RANK, none + t.ROLLED_ATTEMPT, none, columns)


def _still(conn: Connection, cell: Any) -> None:
    """Lock the cell for this transaction, so that a later part cannot overwrite a newer roll-up."""
    touch_nothing = sa.update(t.cell).where(
        t.cell.c.run_id == cell.run_id,
        t.cell.c.tenant == cell.tenant,
        t.cell.c.step0 == cell.step0,
        t.cell.c.revision == cell.revision,
    )
    if conn.execute(touch_nothing.values(compacted_at=cell.compacted_at)).rowcount != 1:
        raise CellChanged


def _drop_others(conn: Connection, cell: Any, sites: Sequence[int], encoded: Sequence[dict[str, Any]]) -> None:
    """Delete sites of an earlier roll-up that a newer attempt no longer has."""
    b = t.block.c
    gone = sorted(set(sites) - {int(row["site"]) for row in encoded})
    if gone:
        conn.execute(
            sa.delete(t.block).where(
                b.run_id == cell.run_id,
                b.tenant == cell.tenant,
                b.attempt == t.ROLLED_ATTEMPT,
                b.rank == t.ROLLED_RANK,
                b.site.in_(gone),
                b.step0 == cell.step0,
            )
        )


def _sites(conn: Connection, cell: Any, keys: Sequence[tuple[int, int]]) -> list[int]:
    b = t.block.c
    found = conn.execute(
        sa.select(b.site)
        .where(
            b.run_id == cell.run_id,
            b.tenant == cell.tenant,
            sa.or_(*(sa.and_(b.attempt == a, b.rank == r) for a, r in keys)),
            b.step0 == cell.step0,
        )
        .distinct()
    ).scalars()
    return sorted(int(site) for site in found)
