"""Reads records from blocks and hot batches, deduplicated and merged over ranks.

Upstream:   fp8watch_server.store.sheets
Downstream: fp8watch_server.store.series
Shapes:     a run, sites, steps -> Records, one of each (site, step), merged over ranks
Thread:     query pool

A step that was recomputed after a restart belongs to the newer attempt, rank by rank (store.attempts), and where only a roll-up is
left of the older, of all ranks; a record that one session sent twice, to the later batch. A cell is *closed* when all of its data is in blocks and its roll-up is made: then its
roll-up (or its only source) is the answer. An open cell is merged from the detail of its ranks and from hot batches, in
the same way as the roll-up, so that the answer stays bit-identical.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import HISTOGRAMS
from fp8watch_server.db import schema as t
from fp8watch_server.store import hot_batches as hot
from fp8watch_server.store import segment_cache
from fp8watch_server.store import sheets as sheet_rows
from fp8watch_server.store.attempts import owners
from fp8watch_server.store.blocks import cell_of, decode
from fp8watch_server.store.cell_records import of_keys
from fp8watch_server.store.hot_batches import step_range
from fp8watch_server.store.rank_merge import over_ranks
from fp8watch_server.store.records import (
    Parts,
    Records,
    counted,
    join,
    newest_of_each,
    owned,
    with_denominators,
)
from fp8watch_server.store.rolled_past import newest_past, past_of

Array = npt.NDArray[Any]
Key = tuple[int, int]  # attempt, rank


@dataclass(frozen=True)
class Extent:
    """Index of a run's data between two steps, before any of it is read."""

    run_id: str
    tenant: str
    from_step: int
    to_step: int
    closed: dict[Key, list[Any]]  # shown block key -> rows of cell
    open: list[Any]  # rows of cell that must be merged
    hot: list[Any]  # rows of hot_batch, without bodies


def extent(
    conn: Connection,
    run_id: str,
    from_step: int | None = None,
    to_step: int | None = None,
    *,
    tenant: str = t.DEFAULT_TENANT,
) -> Extent:
    """Look up cells and hot batches between two steps."""
    low, high = step_range(from_step, to_step)
    rows = hot.rows_between(conn, run_id, low, high, tenant=tenant)
    c = t.cell.c
    names = (
        "step0",
        "revision",
        "sources",
        "shown_attempt",
        "shown_rank",
        "kept",
        "compacted_at",
        "step_min",
        "step_max",
    )
    cells = conn.execute(
        sa.select(*(c[n] for n in names)).where(
            c.run_id == run_id, c.tenant == tenant, c.step0 >= cell_of(low), c.step0 <= high
        )
    ).all()
    touched = _warm([cell.step0 for cell in cells], rows)
    closed: dict[Key, list[Any]] = defaultdict(list)
    still_open = []
    for cell in cells:
        if cell.step_max < low or cell.step_min > high:
            continue
        if cell.shown_rank is None or cell.step0 in touched:
            still_open.append(cell)
        else:
            closed[cell.shown_attempt, cell.shown_rank].append(cell)
    return Extent(run_id, tenant, low, high, dict(closed), still_open, rows)


def num_steps(found: Extent) -> int:
    """From the first step that is there to the last."""
    rows = [*(cell for cells in found.closed.values() for cell in cells), *found.open, *found.hot]
    if not rows:
        return 0
    low, high = min(row.step_min for row in rows), max(row.step_max for row in rows)
    return int(min(high, found.to_step) - max(low, found.from_step)) + 1


def _warm(step0s: Sequence[int], rows: Sequence[Any]) -> set[int]:
    """Those of some cells in which a hot batch may have steps."""
    known = np.sort(np.array(step0s, dtype=np.int64))
    touched = np.zeros(len(known), dtype=bool)
    for row in rows:
        first, last = np.searchsorted(known, [cell_of(row.step_min), row.step_max + 1])
        touched[first:last] = True
    return set(known[touched].tolist())


def gather(
    conn: Connection,
    run_id: str,
    names: Iterable[str],
    *,
    sites: Sequence[int] | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    rank: int | None = None,
    tenant: str = t.DEFAULT_TENANT,
) -> Records:
    """Columns of a run, of one rank, or merged over all ranks as each field merges (record.FIELDS)."""
    found = extent(conn, run_id, from_step, to_step, tenant=tenant)
    return counted(read(conn, found, sorted({*names, "measured"}), sites=sites, rank=rank))


def read(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    *,
    sites: Sequence[int] | None = None,
    rank: int | None = None,
) -> Parts:
    """The records of an extent, unique and sorted by site and step; of one rank, or merged over ranks."""
    names = sorted(with_denominators(names)) if rank is None else names
    ready: list[Parts] = []
    apart: list[Any] = list(found.open)
    for key, cells in found.closed.items():
        if rank is None:
            ready.append(_blocks(conn, found, names, sites, [key], cells, seqs=False))
        else:
            apart += cells
    rows = found.hot if rank is None else [row for row in found.hot if row.rank == rank]
    pieces = segment_cache.segments_of(rows, found.from_step, found.to_step) if rank is None else None
    if pieces is None:
        ready.append(_together(conn, found, names, sites, rank, apart, rows))
    else:
        known = {cell.step0 for cell in apart}
        of_cells = [row for start, of_piece in pieces.items() if cell_of(start) in known for row in of_piece]
        once = sorted({row.arrival: row for row in of_cells}.values(), key=lambda row: int(row.arrival))
        if apart:
            ready.append(_together(conn, found, names, sites, rank, apart, once, known))
        for start, of_piece in sorted(pieces.items()):
            if cell_of(start) not in known:
                ready.append(_piece(conn, found, names, sites, start, of_piece))
    ready = [p for p in ready if len(p)]
    whole = join(ready, names)
    if len(ready) <= 1:
        return _sorted(whole)
    return whole.take(np.lexsort((whole.step, whole.site)))


def _piece(
    conn: Connection, found: Extent, names: Sequence[str], sites: Sequence[int] | None, start: int, rows: Sequence[Any]
) -> Parts:
    """One segment of hot steps, merged over ranks; cached until a batch changes it."""
    low, high = max(start, found.from_step), min(start + segment_cache.PIECE_STEPS - 1, found.to_step)
    cut = replace(found, from_step=low, to_step=high)
    asked = (tuple(names), None if sites is None else tuple(sites), low, high)
    key = (str(conn.engine.url), found.run_id, found.tenant, *asked, segment_cache.batch_keys(rows))
    return segment_cache.SEGMENTS.get(key, lambda: _together(conn, cut, names, sites, None, [], rows))


def _together(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    sites: Sequence[int] | None,
    rank: int | None,
    cells: list[Any],
    rows: Sequence[Any],
    only: set[int] | None = None,
) -> Parts:
    """Merge detail of cells and hot batches, without duplicates; `only`: hot steps of these cells and no others."""
    loose = [_detail(conn, found, names, sites, rank, cells)] if cells else []
    wanted = None if sites is None else np.asarray(sites, dtype=np.uint64)
    for row, batch in hot.load_all(conn, rows):
        part = hot.parts_of(row, batch, names, found.from_step, found.to_step, wanted)
        if part is not None and only is not None:
            part = part.take(np.flatnonzero(np.isin(part.step - part.step % t.BLOCK_STEPS, list(only))))
        if part is not None:
            loose.append(part)
    whole = join([p for p in loose if len(p)], names)
    if not len(whole):
        return whole
    whole = newest_of_each(whole)
    attempts = {key[0] for cell in cells for key in cell.sources} | {row.attempt for row in found.hot}
    for cell in cells:
        if cell.kept != t.KEPT_DETAIL:
            past = newest_past(conn, found.run_id, found.tenant, cell)
            whole.attempt[
                (whole.attempt == t.ROLLED_ATTEMPT) & (whole.step - whole.step % t.BLOCK_STEPS == cell.step0)
            ] = past
            attempts.add(past)
    if len(attempts) > 1:
        first, last = int(whole.step.min()), int(whole.step.max())
        whole = owned(whole, owners(conn, found.run_id, found.tenant, first, last, apart=rank is not None))
    return over_ranks(whole)


def _sorted(parts: Parts) -> Parts:
    """Sort by site and step; blocks usually are already."""
    if len(parts) < 2:
        return parts
    same = parts.site[1:] == parts.site[:-1]
    if bool(((parts.site[1:] > parts.site[:-1]) | (same & (parts.step[1:] > parts.step[:-1]))).all()):
        return parts
    return parts.take(np.lexsort((parts.step, parts.site)))


def _detail(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    sites: Sequence[int] | None,
    rank: int | None,
    cells: list[Any],
) -> Parts:
    by_key: dict[Key, list[Any]] = defaultdict(list)
    for cell in cells:
        for key in detail_keys(cell, rank):
            by_key[key].append(cell)
    groups: dict[tuple[int, ...], list[Key]] = defaultdict(list)  # cells with the same keys are read in one query
    rows = {}
    for key, of_key in by_key.items():
        name = tuple(cell.step0 for cell in of_key)
        groups[name].append(key)
        rows[name] = of_key
    return join(
        [_blocks(conn, found, names, sites, keys, rows[name], seqs=True) for name, keys in groups.items()], names
    )


def detail_keys(cell: Any, rank: int | None = None) -> list[Key]:
    """Keys of the blocks that a cell is merged from; of one rank, those of its attempts."""
    if rank is not None:
        return [(attempt, r) for attempt, r in cell.sources if r == rank]
    if cell.kept != t.KEPT_DETAIL:
        return [(t.ROLLED_ATTEMPT, t.ROLLED_RANK)]
    past = past_of(cell)  # of its attempts only the roll-up: it has all of their ranks
    return [(attempt, r) for attempt, r in cell.sources if attempt > past or (attempt, r) == (past, t.ROLLED_RANK)]


def _blocks(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    sites: Sequence[int] | None,
    keys: Sequence[Key],
    cells: Sequence[Any],
    *,
    seqs: bool,
) -> Parts:
    """Sheets and blocks of some keys and cells, cut to the requested steps."""
    step0s = sorted(cell.step0 for cell in cells)
    parts = join(
        [
            p
            for p in (
                _sheets(conn, found, names, sites, keys, step0s, seqs),
                _old(conn, found, names, sites, keys, step0s, seqs),
            )
            if len(p)
        ],
        names,
    )
    if not len(parts) or (step0s[0] >= found.from_step and step0s[-1] + t.BLOCK_STEPS - 1 <= found.to_step):
        return parts
    mask = (parts.step >= found.from_step) & (parts.step <= found.to_step)
    return parts if mask.all() else parts.take(np.flatnonzero(mask))


def _sheets(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    sites: Sequence[int] | None,
    keys: Sequence[Key],
    step0s: Sequence[int],
    seqs: bool,
) -> Parts:
    x = t.sheet.c
    columns: list[Any] = [x.attempt, x.rank, x.step0, x.num_records, x.body]
    if any(name in HISTOGRAMS for name in names):
        columns.append(x.histograms)
    where = _of_keys(x, found, keys, step0s)
    if sites is not None:
        where += [x.site_min <= max(sites, default=-1), x.site_max >= min(sites, default=0)]
    rows = conn.execute(sa.select(*columns).where(*where).order_by(x.attempt, x.rank, x.step0, x.site_min)).all()
    return sheet_rows.decode(_of_cells(rows, step0s), names, sites=sites, seqs=seqs)


def _old(
    conn: Connection,
    found: Extent,
    names: Sequence[str],
    sites: Sequence[int] | None,
    keys: Sequence[Key],
    step0s: Sequence[int],
    seqs: bool,
) -> Parts:
    """What collectors before the sheets wrote."""
    b = t.block.c
    whole = any(name in HISTOGRAMS for name in names)
    body = b.body if whole else sa.func.substr(b.body, 1, b.front_bytes, type_=sa.LargeBinary).label("body")
    columns: list[Any] = [b.attempt, b.rank, b.site, b.step0, b.num_records, body, b.front_bytes]
    where = [*_of_keys(b, found, keys, step0s), b.front_bytes > 0]
    if sites is not None:
        where.append(b.site.in_([int(s) for s in sites]))
    rows = conn.execute(sa.select(*columns).where(*where).order_by(b.attempt, b.rank, b.site, b.step0)).all()
    return decode(_of_cells(rows, step0s), names, seqs=seqs)


def _of_keys(c: Any, found: Extent, keys: Sequence[Key], step0s: Sequence[int]) -> list[Any]:
    of_run = (c.run_id == found.run_id, c.tenant == found.tenant)
    return [*of_run, of_keys(c, keys), c.step0 >= step0s[0], c.step0 <= step0s[-1]]


def _of_cells(rows: Sequence[Any], step0s: Sequence[int]) -> Sequence[Any]:
    if len(step0s) * t.BLOCK_STEPS == step0s[-1] - step0s[0] + t.BLOCK_STEPS:
        return rows
    wanted = set(step0s)
    return [row for row in rows if row.step0 in wanted]
