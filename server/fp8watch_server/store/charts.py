"""Charts over all sites: top-N worst sites, and heat maps of sites × steps.

Shapes:     Extent -> worst values per site and column -> lists that JSON can hold
Thread:     query pool

Wide ranges are answered from the summaries of their cells, in columns of whole bins of 32 steps; only what a summary
cannot answer (a part of a cell, hot steps, a field without a summary) is read record by record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.fields import SeriesField, as_data, badness, evaluate, series_field
from fp8watch_server.store.reading import Extent, extent, read
from fp8watch_server.store.records import counted
from fp8watch_server.store.series import clamp_points
from fp8watch_server.store.summary import BIN_STEPS, WORST, unpack_summary, worst_of_each

Array = npt.NDArray[Any]

MAX_HEATMAP_CELLS = 1 << 20
FINE_STEPS = 8
"""Up to this many steps a column are read record by record; wider columns are whole bins of summaries."""


@dataclass(frozen=True)
class _Worst:
    """Worst values of any sites in any columns, unordered. All arrays are [N]."""

    site: npt.NDArray[np.uint64]
    column: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]  # step of the value
    first: npt.NDArray[np.int64]  # first step that it covers
    records: npt.NDArray[np.int64]
    values: Array
    present: npt.NDArray[np.bool_]


def _split(found: Extent, name: str) -> tuple[Extent, Extent]:
    """Which cells summaries answer, and which must be read."""
    if name not in WORST:
        return replace(found, closed={}, open=[], hot=[]), found
    whole: dict[tuple[int, int], list[Any]] = {}
    cut: dict[tuple[int, int], list[Any]] = {}
    for key, cells in found.closed.items():
        for cell in cells:
            inside = cell.step_min >= found.from_step and cell.step_max <= found.to_step
            (whole if inside else cut).setdefault(key, []).append(cell)
    return replace(found, closed=whole, open=[], hot=[]), replace(found, closed=cut)


def _from_summaries(conn: Connection, found: Extent, field: SeriesField, width: int) -> list[_Worst]:
    step0s = sorted(cell.step0 for cells in found.closed.values() for cell in cells)
    if not step0s:
        return []
    c, wanted = t.block_meta.c, set(step0s)
    rows = conn.execute(
        sa.select(c.step0, c.body).where(
            c.run_id == found.run_id, c.tenant == found.tenant, c.step0 >= step0s[0], c.step0 <= step0s[-1]
        )
    )
    bit = np.uint16(1 << WORST.index(field.name))
    out = []
    for step0, body in rows:
        if step0 not in wanted:
            continue
        summary = unpack_summary(bytes(body))
        row, bins = np.nonzero(summary["records"])
        out.append(
            _Worst(
                site=summary["site"][row],
                column=(step0 + bins * BIN_STEPS) // width,
                step=step0 + summary[f"{field.name}_at"][row, bins].astype(np.int64),
                first=step0 + summary["first"][row, bins].astype(np.int64),
                records=summary["records"][row, bins].astype(np.int64),
                values=summary[field.name][row, bins],
                present=(summary["present"][row, bins] & bit) != 0,
            )
        )
    return out


def _from_records(conn: Connection, found: Extent, field: SeriesField, width: int) -> list[_Worst]:
    if not (found.closed or found.open or found.hot):
        return []
    names = sorted({*field.needs, "measured"})
    records = counted(read(conn, found, names))
    if not len(records):
        return []
    values, present = evaluate(field, records.columns)
    column = records.step // width
    one = np.ones(len(records), dtype=np.int64)
    return [_Worst(records.site, column, records.step, records.step, one, values, present)]


def _worst(conn: Connection, found: Extent, field: SeriesField, width: int) -> _Worst | None:
    """Reduce to one value per (site, column): the worst, at its first step."""
    cheap, dear = _split(found, field.name) if width % BIN_STEPS == 0 else _split(found, "")
    parts = _from_summaries(conn, cheap, field, width) + _from_records(conn, dear, field, width)
    if not parts:
        return None
    names = ("site", "column", "step", "first", "records", "values", "present")
    a = _Worst(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))
    order = np.lexsort((a.step, a.column, a.site))
    a = _Worst(*(getattr(a, name)[order] for name in names))
    starts = np.flatnonzero(np.concatenate([[True], (a.site[1:] != a.site[:-1]) | (a.column[1:] != a.column[:-1])]))
    at = worst_of_each(badness(a.values, a.present, field.worst), starts)
    return _Worst(
        site=a.site[starts],
        column=a.column[starts],
        step=a.step[at],
        first=np.minimum.reduceat(a.first, starts),
        records=np.add.reduceat(a.records, starts),
        values=a.values[at],
        present=np.logical_or.reduceat(a.present, starts),
    )


def _width(conn: Connection, found: Extent, points: int) -> int:
    """Steps per column, such that columns that begin at its multiples are at most `points`."""
    c = t.scalar.c
    first, last = conn.execute(
        sa.select(sa.func.min(c.step), sa.func.max(c.step)).where(
            c.run_id == found.run_id, c.tenant == found.tenant, c.step >= found.from_step, c.step <= found.to_step
        )
    ).one()
    if first is None:
        return 1

    def columns(width: int) -> int:
        return int(last // width - first // width + 1)

    width = max(1, math.ceil((int(last) - int(first) + 1) / points))
    while columns(width) > points:
        width += 1
    if width > FINE_STEPS:
        width = math.ceil(width / BIN_STEPS) * BIN_STEPS
        while columns(width) > points:
            width += BIN_STEPS
    return width


def top(
    conn: Connection, run_id: str, field: str, n: int = 10, from_step: int | None = None, to_step: int | None = None
) -> dict[str, Any]:
    """The n worst sites of a field: {field, unit, items: [{site, module, operand, direction, step, value, nonfinite}]}.

    Worst is the largest, or the smallest where small is bad (SQNR, minima); NaN is worse than all. `nonfinite` is
    null, or the name of the value that `value` then cannot hold.
    """
    f = series_field(field)
    facts = site_facts(conn, run_id)
    found = _worst(conn, extent(conn, run_id, from_step, to_step), f, 1 << 62)
    worst: list[tuple[float, int, dict[str, Any]]] = []
    if found is not None:
        rank_of = badness(found.values, found.present, f.worst).tolist()
        data, nonfinite = as_data(found.values, found.present)
        marks = dict(nonfinite)
        for i, site in enumerate(found.site.tolist()):
            if found.present[i] and site in facts:
                item = {**facts[site], "step": int(found.step[i]), "value": data[i], "nonfinite": marks.get(i)}
                worst.append((rank_of[i], item.pop("order"), item))
    worst.sort(key=lambda entry: (-entry[0], entry[1]))
    return {**f.said, "items": [item for _, _, item in worst[: max(n, 0)]]}


def heatmap(
    conn: Connection,
    run_id: str,
    field: str,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 200,
) -> dict[str, Any]:
    """Sites × steps, sites in data-flow order: {field, unit, sites, steps, values, nonfinite, stride}.

    `values[i][j]` is site i in column j, null where absent; a column that holds several steps shows the worst of
    them, and `steps[j]` is its first. Steps in which no site has the field are no columns. Columns begin at multiples of
    their width, up to 8 steps or whole multiples of 32; `stride` is how many steps of a site the fullest has. `nonfinite`
    is [[i, j, "nan" | "inf" | "-inf"], …].
    """
    f = series_field(field)
    facts = site_facts(conn, run_id)
    around = extent(conn, run_id, from_step, to_step)
    width = _width(conn, around, min(clamp_points(points), max(1, MAX_HEATMAP_CELLS // max(1, len(facts)))))
    found = _worst(conn, around, f, width)
    if found is None:
        return _heatmap(f, [], np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros((0, 0), bool), 1, facts)
    seen = set(found.site.tolist())
    rows = [site for site in facts if site in seen]
    columns = np.unique(found.column[found.present])  # between samples no site has the field
    inside = np.flatnonzero(np.isin(found.column, columns))
    j = np.searchsorted(columns, found.column)
    steps = np.full(len(columns), np.iinfo(np.int64).max)
    np.minimum.at(steps, j[inside], found.first[inside])
    known = np.array(rows, dtype=np.uint64)
    order = np.argsort(known)
    at = np.searchsorted(known, found.site, sorter=order)
    i = order[np.minimum(at, max(0, len(rows) - 1))] if len(rows) else np.zeros(len(at), np.int64)
    take = np.flatnonzero(found.present & (known[i] == found.site)) if len(rows) else np.zeros(0, np.int64)
    grid = np.zeros((len(rows), len(columns)), dtype=np.float64)
    shown = np.zeros(grid.shape, dtype=bool)
    grid[i[take], j[take]] = found.values[take]
    shown[i[take], j[take]] = True
    return _heatmap(f, rows, steps, grid, shown, int(found.records.max()), facts)


def _heatmap(
    f: SeriesField,
    rows: Sequence[int],
    steps: Array,
    grid: Array,
    shown: npt.NDArray[np.bool_],
    stride: int,
    facts: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    flat, marks = as_data(grid.reshape(-1), shown.reshape(-1))
    width = len(steps)
    return {
        **f.said,
        "sites": [{k: v for k, v in facts[site].items() if k != "order"} | {"id": site} for site in rows],
        "steps": steps.tolist(),
        "values": [flat[r * width : (r + 1) * width] for r in range(len(rows))],
        "nonfinite": [[k // width, k % width, name] for k, name in marks],
        "stride": stride,
    }


def site_facts(conn: Connection, run_id: str) -> dict[int, dict[str, Any]]:
    """Labels of each site for charts, in data-flow order."""
    c = t.site.c
    rows = conn.execute(
        sa.select(c.site, c.module, c.operand, c.direction, c.flow_order)
        .where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
        .order_by(c.flow_order, c.module, c.operand, c.direction)
    )
    return {s: {"site": s, "module": m, "operand": o, "direction": d, "order": f} for s, m, o, d, f in rows}
