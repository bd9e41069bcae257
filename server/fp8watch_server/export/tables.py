"""The tables of a run, a part at a time, out of one snapshot of the database.

Shapes:     a run -> Arrow tables of bounded size
Thread:     `fp8watch export`

A part of the series is at most a cell of steps of some sites, read as charts read it: the same numbers as the API's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import HISTOGRAMS, Measured, StepStatus, holds
from fp8watch_server.db import schema as t
from fp8watch_server.export.columns import BUCKETS, COORDINATES, INCIDENTS, LOGGED, SERIES, SITES, STEPS, Column
from fp8watch_server.store import queries
from fp8watch_server.store.attempts import counting, fewer_ranks
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate
from fp8watch_server.store.reading import Extent, extent, read
from fp8watch_server.store.records import counted
from fp8watch_server.store.rows import SiteRow
from fp8watch_server.store.scalars import read_logged, read_several

Array = npt.NDArray[Any]

RECORDS_AT_ONCE = 1 << 15
"""That are read together, of all ranks, while a cell has no roll-up over them; of a thousand ranks, those of one site."""
MAX_SPAN_STEPS = 1 << 16
"""Batches whose steps are further apart do not say in which cells they have some."""
SCALARS_AT_ONCE = 1 << 16
NAMES = tuple(
    sorted(
        {"measured", *HISTOGRAMS, *(n for f in SERIES_FIELDS.values() for n in f.needs)} | {f.name for f in COORDINATES}
    )
)


@dataclass(frozen=True)
class Asked:
    """What is exported."""

    run_id: str
    from_step: int
    to_step: int
    per_rank: bool = False


def _table(columns: Sequence[Column], arrays: Sequence[Any]) -> pa.Table:
    made = [a if isinstance(a, pa.Array) else pa.array(a, c.type) for c, a in zip(columns, arrays, strict=True)]
    return pa.Table.from_arrays(made, names=[c.name for c in columns])


def _spans(conn: Connection, table: sa.Table, asked: Asked, width: int) -> list[tuple[int, int]]:
    """Ranges of steps of a table in which there are any, at most `width` long."""
    c = table.c
    number = c.step // width
    rows = conn.execute(
        sa.select(number).where(c.run_id == asked.run_id, c.tenant == t.DEFAULT_TENANT,
                                c.step >= asked.from_step, c.step <= asked.to_step).distinct().order_by(number)
    ).scalars()  # fmt: skip
    return [(max(n * width, asked.from_step), min((n + 1) * width - 1, asked.to_step)) for n in map(int, rows)]


def _num_ranks(conn: Connection, run_id: str) -> int:
    c = t.session.c
    query = sa.select(sa.func.count(c.rank.distinct())).where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
    return max(1, int(conn.execute(query).scalar_one()))


def steps(conn: Connection, asked: Asked) -> Iterator[pa.Table]:
    """One row a step: scalars, and how many ranks have told of it."""
    width = max(t.BLOCK_STEPS, SCALARS_AT_ONCE // _num_ranks(conn, asked.run_id) // t.BLOCK_STEPS * t.BLOCK_STEPS)
    for low, high in _spans(conn, t.scalar, asked, width):
        step, attempt, status, num_ranks, time = _ends(conn, asked.run_id, low, high)
        found = read_several(conn, extent(conn, asked.run_id, low, high), t.SCALAR_NAMES, None)
        scalars = []
        for of_steps, values, present in found.values():
            at = np.searchsorted(of_steps, step)
            scalars.append(pa.array(values[at], pa.float64(), mask=~present[at]))
        yield _table(STEPS, [step, attempt, status, num_ranks, time, *scalars])


def _ends(conn: Connection, run_id: str, low: int, high: int) -> tuple[Any, ...]:
    """Of each step: newest attempt, worst status, number of ranks, latest time; of each rank that counts, its newest attempt."""
    c = t.scalar.c
    where = [c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.step >= low, c.step <= high]
    rows = conn.execute(sa.select(c.step, c.rank, c.attempt, c.status, c.time).where(*where)).all()
    dtype = [("step", "<i8"), ("rank", "<i8"), ("attempt", "<i8"), ("status", "<i8"), ("time", "<f8")]
    found = np.array([tuple(row) for row in rows], dtype=dtype)
    fewer = fewer_ranks(conn, run_id, t.DEFAULT_TENANT)
    found = found[counting(fewer, found["rank"], found["step"], found["attempt"])]
    found = found[np.lexsort((found["attempt"], found["rank"], found["step"]))]
    last = np.ones(len(found), dtype=bool)
    last[:-1] = (found["step"][1:] != found["step"][:-1]) | (found["rank"][1:] != found["rank"][:-1])
    found = found[last]
    starts = np.flatnonzero(np.concatenate([[True], found["step"][1:] != found["step"][:-1]]))
    attempt, status = (np.maximum.reduceat(found[name], starts) for name in ("attempt", "status"))
    time = np.fmax.reduceat(found["time"], starts)  # a rank may have none
    names = [StepStatus(s).name.lower() for s in status.tolist()]
    num_ranks = np.diff([*starts, len(found)])
    return found["step"][starts], attempt, names, num_ranks, pa.array(time, pa.float64(), mask=np.isnan(time))


def logged(conn: Connection, asked: Asked) -> Iterator[pa.Table]:
    """One row a name and step."""
    c = t.logged.c
    of_run = [c.run_id == asked.run_id, c.tenant == t.DEFAULT_TENANT]
    names = list(conn.execute(sa.select(c.name).where(*of_run).distinct().order_by(c.name)).scalars())
    width = max(t.BLOCK_STEPS, SCALARS_AT_ONCE // _num_ranks(conn, asked.run_id))
    for low, high in _spans(conn, t.logged, asked, width):
        for number, name in enumerate(names):
            step, values, present = read_logged(conn, asked.run_id, name, low, high, None)
            named = pa.DictionaryArray.from_arrays(np.full(len(step), number, np.int32), names)
            yield _table(LOGGED, [named, step, pa.array(values, pa.float64(), mask=~present)])


def series(conn: Connection, asked: Asked) -> Iterator[pa.Table]:
    """One row a site and step, merged over ranks; per rank, one a site, step and rank. By cells, then sites, then steps."""
    sites = sorted(queries.sites(conn, asked.run_id), key=lambda site: site["id"])
    place = _Place(sites)
    for low, high in _cells(conn, asked):
        found = extent(conn, asked.run_id, low, high)
        ranks = _ranks(found)
        sources = 1 if found.closed else max(1, len(ranks))
        at_once = max(1, RECORDS_AT_ONCE // (sources * t.BLOCK_STEPS))
        num_steps = _steps_at_once(found, len(sites), len(ranks))
        for first in range(low - low % num_steps, high + 1, num_steps):
            part = extent(conn, asked.run_id, max(first, low), min(first + num_steps - 1, high))
            for start in range(0, len(sites), at_once):
                chosen = [site["id"] for site in sites[start : start + at_once]]
                for rank in ranks if asked.per_rank else [None]:
                    records = counted(read(conn, part, NAMES, sites=chosen, rank=rank))
                    if len(records):
                        yield _series_table(records.site, records.step, records.columns, place, rank)


def _cells(conn: Connection, asked: Asked) -> list[tuple[int, int]]:
    """Ranges of steps, a cell or less, in which there are records."""
    found = extent(conn, asked.run_id, asked.from_step, asked.to_step)
    starts = {cell.step0 for cells in found.closed.values() for cell in cells} | {cell.step0 for cell in found.open}
    if any(row.step_max - row.step_min > MAX_SPAN_STEPS for row in found.hot):
        starts |= {low - low % t.BLOCK_STEPS for low, _ in _spans(conn, t.scalar, asked, t.BLOCK_STEPS)}
    else:
        for row in found.hot:
            starts |= set(range(row.step_min - row.step_min % t.BLOCK_STEPS, row.step_max + 1, t.BLOCK_STEPS))
    spans = [(max(s, asked.from_step), min(s + t.BLOCK_STEPS - 1, asked.to_step)) for s in sorted(starts)]
    return [(low, high) for low, high in spans if low <= high]


def _ranks(found: Extent) -> list[int]:
    cells = [*(cell for cells in found.closed.values() for cell in cells), *found.open]
    of_cells = {rank for cell in cells for _, rank in cell.sources if rank != t.ROLLED_RANK}
    return sorted(of_cells | {row.rank for row in found.hot})


def _steps_at_once(found: Extent, num_sites: int, num_ranks: int) -> int:
    """Batches are decoded whole, with all their sites: where they wait for compaction, fewer steps together."""
    if not found.hot:
        return t.BLOCK_STEPS
    fit = RECORDS_AT_ONCE // max(1, num_sites * num_ranks)
    return min(t.BLOCK_STEPS, 1 << max(3, fit.bit_length() - 1))


class _Place:
    """Module, operand and direction of a site, written once a file."""

    def __init__(self, sites: Sequence[SiteRow]) -> None:
        self._ids = np.array([site["id"] for site in sites], dtype=np.int64)
        self._words: list[tuple[npt.NDArray[np.int32], list[str]]] = []
        for given in ([s["module"] for s in sites], [s["operand"] for s in sites], [s["direction"] for s in sites]):
            words, codes = np.unique(np.array(given, dtype=object), return_inverse=True)
            self._words.append((codes.astype(np.int32), words.tolist()))

    def arrays(self, ids: npt.NDArray[np.int64]) -> list[pa.Array]:
        """Of some sites."""
        at = np.searchsorted(self._ids, ids)
        return [pa.DictionaryArray.from_arrays(codes[at], words) for codes, words in self._words]


def _series_table(site: Array, step: Array, columns: dict[str, Array], place: _Place, rank: int | None) -> pa.Table:
    ids, n = site.astype(np.int64), len(step)
    full = holds(columns["measured"], Measured.ENERGIES)
    arrays: list[Any] = [ids, *place.arrays(ids), step, pa.array([rank] * n, pa.int32()), full]
    for field, column in zip(SERIES_FIELDS.values(), SERIES[len(arrays) :], strict=False):
        values, present = evaluate(field, columns)
        arrays.append(pa.array(values, column.type, mask=~present))
    for f in COORDINATES:
        values = columns[f.name]
        there = holds(columns["measured"], f.group) & (values[:, 0] >= 0)
        arrays.append(_lists(values.astype(np.int32), there))
    for f in BUCKETS:
        arrays.append(_lists(columns[f.name], holds(columns["measured"], f.group)))
    return _table(SERIES, arrays)


def _lists(values: Array, there: npt.NDArray[np.bool_]) -> pa.Array:
    """[N, size] -> N lists, null where there is none."""
    size = values.shape[1]
    ends = np.cumsum(there.astype(np.int32)) * size
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32), mask=np.concatenate([~there, [False]]))
    return pa.ListArray.from_arrays(offsets, pa.array(values[there].reshape(-1)))


def sites(conn: Connection, asked: Asked) -> Iterator[pa.Table]:
    """One row a site, in data-flow order."""
    rows = queries.sites(conn, asked.run_id)
    names: dict[str, str | tuple[str, int]] = {"site": "id", "num_rows": ("shape", 0), "num_columns": ("shape", 1)}
    names |= {"tile_rows": ("tile", 0), "tile_columns": ("tile", 1)}

    def value(row: Any, name: str) -> Any:
        at = names.get(name, name)
        return row[at] if isinstance(at, str) else row[at[0]][at[1]]

    yield _rows(SITES, [{c.name: value(row, c.name) for c in SITES} for row in rows])


def incidents(conn: Connection, asked: Asked) -> Iterator[pa.Table]:
    """One row an incident, the newest first, of those that have a step in the range."""
    cursor: str | None = None
    while True:
        page, cursor = queries.incidents_page(conn, asked.run_id, cursor=cursor, limit=queries.MAX_LIMIT)
        kept = [row for row in page if row["first_step"] <= asked.to_step and row["last_step"] >= asked.from_step]
        yield _rows(INCIDENTS, [{**dict(row["place"]), **dict(row)} for row in kept])
        if cursor is None:
            return


def _rows(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> pa.Table:
    def value(row: dict[str, Any], column: Column) -> Any:
        got = row.get(column.name)
        return json.dumps(got, ensure_ascii=False) if column.unit == "JSON" else got

    return _table(columns, [[value(row, c) for row in rows] for c in columns])


MAKERS = {"steps": steps, "series": series, "logged": logged, "incidents": incidents, "sites": sites}
