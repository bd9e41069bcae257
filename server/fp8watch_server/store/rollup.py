"""Roll-up of a cell over its ranks, with the rank of each maximum; and the cell's summary.

Shapes:     sheets of all (attempt, rank) of a cell -> sheets of (0, −1), a part of the sites at a time
Thread:     compactor

Until the last part is written, queries merge the cell from its detail; a crash on the way leaves sheets that nobody
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
from fp8watch_server.store import blocks, sheets
from fp8watch_server.store.attempts import owners
from fp8watch_server.store.cell_records import bytes_of, drop_records, put_records, read_records, size_of
from fp8watch_server.store.compact import ROLLED, CellChanged, CrashPoint, cell_row, no_crash, put_summary, touch
from fp8watch_server.store.rank_merge import RankMerge
from fp8watch_server.store.reading import detail_keys
from fp8watch_server.store.records import Parts, owned
from fp8watch_server.store.rolled_past import newest_past
from fp8watch_server.store.scalars import put_scalar_block
from fp8watch_server.store.summary import SUMMARY, summarize

SITES_A_PART = 4 * sheets.SITES_A_SHEET
"""Sites per transaction, to keep transactions short and memory small: a thousand ranks are merged one after the other."""


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
        keys, past = detail_keys(cell), newest_past(conn, run_id, tenant, cell)
        # counted anew: what compaction wrote again it has added again
        num_bytes = bytes_of(conn, run_id, tenant, {*keys, *((a, r) for a, r in cell.sources)}, step0)
        sites = _sites(conn, cell)
        several = len({attempt for attempt, _ in keys}) > 1
        owner = owners(conn, run_id, tenant, step0, step0 + t.BLOCK_STEPS - 1) if several else None
    merge = len(keys) > 1
    shown = ROLLED if merge else keys[0]
    arrays = engine.dialect.name == "postgresql"
    old = _has_blocks(engine, cell, keys)
    summaries: list[npt.NDArray[np.void]] = []
    if merge:  # of two collectors at work the later goes on alone
        with writing(engine) as conn:
            touch(conn, cell)
            drop_records(conn, run_id, tenant, ROLLED, step0, [])
        cell = _At(cell)
    for start in range(0, len(sites), SITES_A_PART):
        part = sites[start : start + SITES_A_PART]
        with engine.connect() as conn:
            if merge:
                parts = _merged(conn, cell, keys, part, owner, old)
            else:
                parts = read_records(conn, run_id, tenant, keys, step0, part, old=old)
        summaries.append(summarize(parts, step0))
        if merge or arrays:
            encoded = sheets.encode(parts, step0) if merge else []
            for_sql = blocks.arrays_of(parts, step0) if arrays else []
            num_bytes += size_of(encoded)
            crash("rollup.encoded")
            with writing(engine) as conn:
                _still(conn, cell)
                if merge:
                    _drop_blocks(conn, cell, part)
                put_records(conn, run_id, tenant, shown, encoded, for_sql)
                crash("rollup.part")
    summary = np.concatenate(summaries) if summaries else np.zeros(0, dtype=SUMMARY)
    with writing(engine) as conn:
        touch(conn, cell, shown_attempt=shown[0], shown_rank=shown[1], num_bytes=num_bytes)
        put_summary(conn, run_id, tenant, step0, summary)
        put_scalar_block(conn, run_id, tenant, step0, past)
        crash("rollup.shown")
    crash("rollup.committed")
    return True


class _At:
    """The row of a cell one revision later."""

    def __init__(self, row: Any) -> None:
        self._row, self.revision = row, row.revision + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


def _has_blocks(engine: Engine, cell: Any, keys: Sequence[tuple[int, int]]) -> bool:
    """Whether some records of a cell may be in blocks of an earlier collector: sheets have fewer than came."""
    x = t.sheet.c
    of_cell = (x.run_id == cell.run_id, x.tenant == cell.tenant, x.step0 == cell.step0)
    num = 0
    with engine.connect() as conn:
        for attempt, rank in keys:
            this = sa.select(sa.func.sum(x.num_records)).where(*of_cell, x.attempt == attempt, x.rank == rank)
            num += int(conn.execute(this).scalar() or 0)
    return bool(num != cell.num_records)


def _merged(
    conn: Connection,
    cell: Any,
    keys: Sequence[tuple[int, int]],
    sites: Sequence[int],
    owner: dict[tuple[int, int], int] | None,
    old: bool,
) -> Parts:
    """Some sites of a cell over its ranks, one after the other."""
    known = np.array(sites, dtype=np.uint64)
    merge = RankMerge(len(known) * t.BLOCK_STEPS)
    for key in sorted(keys, key=lambda key: (key[1], key[0])):
        parts = owned(read_records(conn, cell.run_id, cell.tenant, [key], cell.step0, sites, old=old), owner)
        if not len(parts):
            continue
        slots = np.searchsorted(known, parts.site) * t.BLOCK_STEPS + (parts.step - cell.step0)
        first, last = int(slots[0]), int(slots[-1])
        at = slice(first, last + 1) if last - first + 1 == len(slots) else slots
        merge.add(blocks.with_ranks(parts).columns, at)
    there = np.flatnonzero(merge.seen)
    none = np.zeros(len(there), dtype=np.int64)
    site, step = known[there // t.BLOCK_STEPS], cell.step0 + there % t.BLOCK_STEPS
    return Parts(site, step, none + t.ROLLED_RANK, none + t.ROLLED_ATTEMPT, none, merge.columns())


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


def _drop_blocks(conn: Connection, cell: Any, sites: Sequence[int]) -> None:
    """Delete what an earlier roll-up left: a newer attempt may not have all of its sites."""
    b = t.block.c
    this = (b.run_id == cell.run_id, b.tenant == cell.tenant, b.step0 == cell.step0, b.site.in_(sites))
    conn.execute(sa.delete(t.block).where(*this, b.attempt == t.ROLLED_ATTEMPT, b.rank == t.ROLLED_RANK))


def _sites(conn: Connection, cell: Any) -> list[int]:
    """All sites of the run; those without a record in the cell cost nothing."""
    s = t.site.c
    of_run = (s.run_id == cell.run_id, s.tenant == cell.tenant)
    return list(conn.execute(sa.select(s.site).where(*of_run).order_by(s.site)).scalars())
