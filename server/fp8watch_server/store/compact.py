"""Compaction: hot batches become sheets, 256 steps of a rank at a time.

Upstream:   fp8watch_server.store.commit (table hot_batch)
Downstream: fp8watch_server.store.sheets
Shapes:     hot_batch rows of one (attempt, rank) within one cell -> a sheet per 32 sites, in one transaction
Thread:     compactor

Reading, merging and packing happen before the write lock is taken; the transaction only replaces rows. It is rolled
back when the cell has changed since (by its revision), and retried later. A batch leaves hot_batch in the same
transaction that puts its last step into a sheet, so no step is ever in both or in neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from fp8watch_agent.wire import Batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing
from fp8watch_server.store import batch_dedup, blocks, hot_batches, sheets
from fp8watch_server.store.attempts import owners
from fp8watch_server.store.cell_records import (
    SITES_AT_ONCE,
    drop_records,
    joined,
    num_records_of,
    put_records,
    read_records,
    rename_records,
    size_of,
)
from fp8watch_server.store.light_rounding import round_light
from fp8watch_server.store.rank_merge import over_ranks
from fp8watch_server.store.records import Parts, join, newest_of_each
from fp8watch_server.store.rolled_past import newest_past
from fp8watch_server.store.scalars import put_scalar_block
from fp8watch_server.store.summary import pack_summary, summarize

CLOSE_AFTER_STEPS = 32
"""Steps past the end of a cell before it is compacted: batches of other ranks may be on their way."""
COOL_AFTER_S = 600.0
"""Age at which a batch is compacted, however few its steps are, once its attempt is idle or has waited for long."""
WAITS_TIMES = 6
"""Times that age: of a run of slow steps what waits is compacted together, not batch by batch as each comes of age."""
MAX_BATCHES = 4096
ROLLED = (t.ROLLED_ATTEMPT, t.ROLLED_RANK)

CrashPoint = Callable[[str], None]


def no_crash(name: str) -> None:
    """Hook where tests inject a crash."""


class CellChanged(Exception):
    """The cell was changed concurrently: retry later."""


@dataclass(frozen=True)
class Group:
    """Input of one compaction transaction: batches of one source with steps in one cell."""

    run_id: str
    tenant: str
    step0: int
    attempt: int
    rank: int
    rows: list[Any]  # of hot_batch, without bodies
    alone: bool  # the run has one rank and one attempt: its sheets are what charts show
    more: bool = False  # other batches of the cell are left for the next round


def groups_of(
    conn: Connection, run_id: str, tenant: str, now: float, *, cool_after_s: float = COOL_AFTER_S
) -> list[Group]:
    """Groups that can be compacted now, by cell, lowest steps first. Batches wait for the detectors.

    A batch that spans several cells is compacted one cell per round, lowest first: its steps may be far apart.
    """
    b = t.hot_batch.c
    of_run = (b.run_id == run_id, b.tenant == tenant)
    names = ("run_id", "tenant", "session", "rank", "seq", "attempt", "arrival", "received_at")
    times = (sa.func.min(b.received_at), sa.func.max(b.received_at))
    span = sa.select(b.attempt, sa.func.max(b.step_max), *times)
    attempts = conn.execute(span.where(*of_run, b.step_max.is_not(None)).group_by(b.attempt)).all()
    if not attempts:
        return []
    ripe = sa.or_(sa.false())
    for attempt, last, oldest, newest in attempts:
        end = blocks.cell_of(max(0, last + 1 - CLOSE_AFTER_STEPS))
        ripe |= (b.attempt == attempt) & (b.step_min < end)
        if newest <= now - cool_after_s or oldest <= now - cool_after_s * WAITS_TIMES:
            ripe |= (b.attempt == attempt) & (b.received_at <= now - cool_after_s)
    rows = conn.execute(
        sa.select(*(b[n] for n in names), b.step_min, b.step_max, b.body_sha256)
        .where(*of_run, b.detected != t.BATCH_PENDING, b.step_min.is_not(None), ripe)
        .order_by(b.step_min - b.step_min % t.BLOCK_STEPS, b.attempt, b.rank, b.arrival)
        .limit(MAX_BATCHES)
    ).all()
    found: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
    for row in rows:
        found[blocks.cell_of(row.step_min), row.attempt, row.rank].append(row)
    s = t.session.c
    sources = conn.execute(sa.select(s.rank, s.attempt).where(s.run_id == run_id, s.tenant == tenant).limit(2)).all()
    keys = sorted(found)
    cut = keys[-1][0] if len(rows) == MAX_BATCHES else None
    if cut is not None and len(keys) > 1:
        keys.pop()  # it may not be whole
    return [
        Group(run_id, tenant, step0, attempt, rank, found[step0, attempt, rank], len(sources) == 1, step0 == cut)
        for step0, attempt, rank in keys
    ]


def compact(engine: Engine, group: Group, now: float, *, crash: CrashPoint = no_crash) -> int:
    """Compact a group into blocks. Returns the number of records of its batches.

    Raises:
        CellChanged: nothing was written.
        sqlalchemy.exc.SQLAlchemyError: nothing was written.
    """
    with engine.connect() as conn:
        cell = cell_row(conn, group.run_id, group.tenant, group.step0)
        got = hot_batches.load_all(conn, _first_here(conn, group))
        sent = {"measured"}.union(*(batch.sent for _, batch in got))
        names = [name for name in blocks.ALL_FIELDS if name in sent]  # what no batch has takes no time
        fresh = [hot_batches.parts_of(row, batch, names, *_steps(group), rounded=False) for row, batch in got]
        sent_now = join([p for p in fresh if p is not None], names)
        round_light(sent_now.columns, sent_now.columns, slice(None))
        new = newest_of_each(sent_now)
        way = _way(conn, group, cell)
        if way.late:
            owner = owners(conn, group.run_id, group.tenant, *_steps(group))
            newest = [owner.get((t.ROLLED_RANK, step), 0) for step in new.step.tolist()]
            new = new.take(np.flatnonzero(np.array(newest, dtype=np.int64) <= group.attempt))
        old = _there(conn, group, cell, way.into)
    if not got:
        return 0
    if cell is not None and cell.kept == t.KEPT_SUMMARY and way.late:
        return _too_late(engine, group, cell, got)
    rows = [row for row, _ in got]
    source, into = (group.attempt, group.rank), way.into
    merged = _together(old, new, into)
    at_once = group.alone and cell is None
    arrays = engine.dialect.name == "postgresql" and (at_once or into == ROLLED)
    encoded = sheets.encode(merged, group.step0)
    for_sql = blocks.arrays_of(merged, group.step0) if arrays else []
    summary = summarize(merged, group.step0) if at_once else None
    num_new = len(merged) - len(old)
    crash("compact.encoded")
    with writing(engine) as conn:
        claim = _Claim(source if at_once else None, len(merged) - len(old), size_of(encoded), now)
        _claim(conn, group, rows, cell, claim, way)
        crash("compact.claimed")
        if way.past:
            rename_records(conn, group.run_id, group.tenant, ROLLED, (way.past, t.ROLLED_RANK), group.step0)
        if len(old):
            drop_records(conn, group.run_id, group.tenant, into, group.step0, np.unique(old.site).tolist())
        put_records(conn, group.run_id, group.tenant, into, encoded, for_sql)
        if summary is not None:
            put_summary(conn, group.run_id, group.tenant, group.step0, summary)
            put_scalar_block(conn, group.run_id, group.tenant, group.step0)
        crash("compact.blocks")
        _let_go(conn, group, got)
        crash("compact.released")
    crash("compact.committed")
    return num_new


def _too_late(engine: Engine, group: Group, cell: Any, got: Sequence[tuple[Any, Batch]]) -> int:
    """Only the summary of this cell is kept: late data is dropped as its blocks were."""
    with writing(engine) as conn:
        touch(conn, cell)
        _let_go(conn, group, got)
    return 0


def cell_row(conn: Connection, run_id: str, tenant: str, step0: int) -> Any:
    """A row of `cell`, or None."""
    c = t.cell.c
    return conn.execute(sa.select(t.cell).where(c.run_id == run_id, c.tenant == tenant, c.step0 == step0)).first()


def _steps(group: Group) -> tuple[int, int]:
    return group.step0, group.step0 + t.BLOCK_STEPS - 1


def _first_here(conn: Connection, group: Group) -> list[Any]:
    """Current rows of the group: those whose first remaining step is in this cell."""
    b = t.hot_batch.c
    now_at = {
        row.arrival: row
        for row in conn.execute(
            sa.select(b.arrival, b.step_min).where(
                b.run_id == group.run_id,
                b.tenant == group.tenant,
                b.arrival >= min(row.arrival for row in group.rows),
                b.arrival <= max(row.arrival for row in group.rows),
            )
        )
    }
    low, high = _steps(group)
    out = []
    for row in group.rows:
        current = now_at.get(row.arrival)
        if current is not None and low <= current.step_min <= high:
            out.append(_Row(row, current.step_min))
    return out


class _Row:
    """A row of hot_batch with its first remaining step."""

    def __init__(self, row: Any, step_min: int) -> None:
        self._row, self.step_min = row, step_min

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


@dataclass(frozen=True)
class _Way:
    """Where the records of a group go, and what becomes of a cell without detail.

    `late`: of attempts whose detail has gone. `past`: the newest of these where the roll-up becomes a source beside the new
    one, with `num_records` in all sources that are there; else 0.
    """

    into: tuple[int, int]
    late: bool = False
    past: int = 0
    num_records: int = 0


def _way(conn: Connection, group: Group, cell: Any) -> _Way:
    source = (group.attempt, group.rank)
    past = 0 if cell is None else newest_past(conn, group.run_id, group.tenant, cell)
    if group.attempt <= past:
        return _Way(ROLLED if cell.kept != t.KEPT_DETAIL else (past, t.ROLLED_RANK), late=True)
    if cell is None or cell.kept == t.KEPT_DETAIL:
        return _Way(source)
    there = [ROLLED, *((attempt, rank) for attempt, rank in cell.sources)]
    return _Way(source, past=past, num_records=num_records_of(conn, group.run_id, group.tenant, there, group.step0))


def _there(conn: Connection, group: Group, cell: Any, into: tuple[int, int]) -> Parts:
    """Current contents of the blocks that the new records go into."""
    if cell is None or (into != ROLLED and list(into) not in cell.sources):
        return join([], blocks.ALL_FIELDS)
    return read_records(conn, group.run_id, group.tenant, [into], group.step0)


def _together(old: Parts, new: Parts, into: tuple[int, int]) -> Parts:
    if into[1] != t.ROLLED_RANK:
        return new if not len(old) else newest_of_each(joined(old, new))
    # the detail is deleted: late records are merged into the roll-up, as one more rank
    both = joined(old, blocks.with_ranks(new))
    return over_ranks(both.take(np.lexsort((both.rank, both.step, both.site))))


@dataclass(frozen=True)
class _Claim:
    """New values of the cell's row in a transaction."""

    shown: tuple[int, int] | None
    num_records: int
    num_bytes: int
    now: float


def _claim(conn: Connection, group: Group, rows: Sequence[Any], cell: Any, claim: _Claim, way: _Way) -> None:
    """Update the row of the cell if its revision is unchanged."""
    shown = claim.shown or (None, None)
    values: dict[str, Any] = {"shown_attempt": shown[0], "shown_rank": shown[1], "compacted_at": claim.now}
    low, high = _steps(group)
    first = max(low, min(row.step_min for row in rows))
    last = min(high, max(row.step_max for row in rows))
    source = [group.attempt, group.rank]
    if cell is None:
        row = {"run_id": group.run_id, "tenant": group.tenant, "step0": group.step0, "revision": 1}
        row |= {"sources": [source], "kept": t.KEPT_DETAIL, "step_min": first, "step_max": last}
        row |= {"num_records": claim.num_records, "num_bytes": claim.num_bytes, **values}
        try:
            conn.execute(sa.insert(t.cell), [row])
        except sa.exc.IntegrityError as e:  # another collector was first, or the run was deleted
            raise CellChanged from e
        return
    sources = [list(s) for s in cell.sources]
    also = [] if way.late else [source]
    also += [[way.past, t.ROLLED_RANK]] if way.past else []
    values["sources"] = sorted([*sources, *(s for s in also if s not in sources)])
    num_records = way.num_records if way.past else cell.num_records
    values |= {"num_records": num_records + claim.num_records, "num_bytes": cell.num_bytes + claim.num_bytes}
    values |= {"kept": t.KEPT_DETAIL} if way.past else {}
    values |= {"step_min": min(cell.step_min, first), "step_max": max(cell.step_max, last)}
    touch(conn, cell, **values)


def touch(conn: Connection, cell: Any, **values: Any) -> None:
    """Update the row of a cell if its revision is unchanged.

    Raises:
        CellChanged: it is not.
    """
    c = t.cell.c
    this = (c.run_id == cell.run_id, c.tenant == cell.tenant, c.step0 == cell.step0, c.revision == cell.revision)
    changed = conn.execute(sa.update(t.cell).where(*this).values(revision=cell.revision + 1, **values))
    if changed.rowcount != 1:
        raise CellChanged


def put_summary(conn: Connection, run_id: str, tenant: str, step0: int, summary: npt.NDArray[np.void]) -> None:
    """Write the summary of a cell."""
    row = {"run_id": run_id, "tenant": tenant, "step0": step0, "num_sites": len(summary)}
    upsert(conn, t.block_meta, [{**row, "body": pack_summary(summary)}])


def _let_go(conn: Connection, group: Group, got: Sequence[tuple[Any, Batch]]) -> None:
    """Release batches that are completely in blocks; the others keep their later steps."""
    end = group.step0 + t.BLOCK_STEPS
    done: list[Any] = []
    left: dict[int, list[int]] = defaultdict(list)  # first remaining step -> arrivals
    for row, batch in got:
        steps = batch.steps["step"]
        later = int(np.searchsorted(steps, end))
        if later == len(steps):
            done.append(row)
        else:
            left[int(steps[later])].append(row.arrival)
    release(conn, group.run_id, group.tenant, done)
    b = t.hot_batch.c
    of_run = (b.run_id == group.run_id, b.tenant == group.tenant)
    for step_min, of_step in left.items():
        for start in range(0, len(of_step), SITES_AT_ONCE):
            part = of_step[start : start + SITES_AT_ONCE]
            conn.execute(sa.update(t.hot_batch).where(*of_run, b.arrival.in_(part)).values(step_min=step_min))


def release(conn: Connection, run_id: str, tenant: str, rows: Sequence[Any]) -> None:
    """Delete batches of a run from hot_batch and add their keys to the ledger.

    The run is locked as ingest locks it: a concurrent resend of a batch finds the key in one place or the other.

    Raises:
        CellChanged: one of them is not there any more.
    """
    r, b = t.run.c, t.hot_batch.c
    this_run = sa.select(r.run_id).where(r.run_id == run_id, r.tenant == tenant)
    conn.execute(this_run.with_for_update(key_share=True))
    for start in range(0, len(rows), SITES_AT_ONCE):
        these = b.arrival.in_([row.arrival for row in rows[start : start + SITES_AT_ONCE]])
        gone = conn.execute(sa.delete(t.hot_batch).where(b.run_id == run_id, b.tenant == tenant, these))
        if gone.rowcount != len(rows[start : start + SITES_AT_ONCE]):
            raise CellChanged
    batch_dedup.enter(conn, rows)
