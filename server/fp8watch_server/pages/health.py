"""Health map of a run: layers × steps, the worst value of each cell and its site.

Shapes:     heatmaps of sites [S, T] -> rows [R ≤ MAX_ROWS, T] of layers, each cell with the site behind it
Thread:     worker threads of the server

A run may have 10,000 sites: the size of the response is bounded by rows and columns, not by sites. A site that was
never quantised (a probe on the output of a module) has no quantisation noise; its exactness is not shown as a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection

from fp8watch_server.pages.health_maps import of_quantiser
from fp8watch_server.store import deviation, queries
from fp8watch_server.store.fields import SERIES_FIELDS
from fp8watch_server.store.rows import RunRow
from fp8watch_server.store.site_rows import Row as Row
from fp8watch_server.store.site_rows import rows_of as rows_of

Floats = npt.NDArray[np.float64]

MAX_COLUMNS = 1000
MAX_MARKS = 4000
MAX_FINE_RECORDS = 400_000
"""More records than these are answered from their summaries, in columns of whole bins: tens of milliseconds, not seconds."""
SUMMARY_STEPS = 9
"""Columns of so many steps and more are made of whole summaries (fp8watch_server.store.charts.FINE_STEPS)."""
NOISELESS_DB = 99.0
"""Shown for a tile SQNR of +Inf (lossless): the best value, and not marked as non-finite."""
NOW_STEPS, NOW_CELLS = 8, 200_000
NAMES = {"nan": "is NaN", "inf": "is +Inf", "-inf": "is −Inf"}


@dataclass(frozen=True)
class _Grid:
    """A heatmap as arrays."""

    values: Floats  # [S, T], NaN when absent or non-finite
    special: dict[int, dict[int, str]]  # site -> column -> name of the non-finite value


def _grid(found: dict[str, Any]) -> _Grid:
    values = np.array(found["values"], dtype=np.float64).reshape(len(found["sites"]), len(found["steps"]))
    special: dict[int, dict[int, str]] = {}
    for i, j, what in found["nonfinite"]:
        if what == "inf" and found["field"] == "tile_sqnr_db":
            values[i, j] = NOISELESS_DB
        else:
            special.setdefault(i, {})[j] = NAMES[what]
    return _Grid(values, special)


def _aligned(found: dict[str, Any], bad: dict[str, Any]) -> Floats:
    """Counts of non-finite elements on the rows and columns of another heatmap of the same widths, 0 when unknown. [S, T]"""
    out = np.zeros((len(found["sites"]), len(found["steps"])))
    counts = np.nan_to_num(_grid(bad).values)
    row_of = {s["id"]: i for i, s in enumerate(bad["sites"])}
    column_of = {step: j for j, step in enumerate(bad["steps"])}
    columns = [(j, column_of[step]) for j, step in enumerate(found["steps"]) if step in column_of]
    for i, site in enumerate(found["sites"]):
        if columns and site["id"] in row_of:
            to, of = zip(*columns, strict=True)
            out[i, list(to)] = counts[row_of[site["id"]], list(of)]
    return out


def _affordable(run: RunRow, from_step: int | None, to_step: int | None) -> int:
    """Number of columns that can be read quickly: unlimited for few records, else what summaries answer."""
    last = int(run["last_step"] or 0)
    num_steps = max(1, min(last, to_step if to_step is not None else last) - (from_step or 0) + 1)
    if num_steps * int(run["num_sites"]) * int(run["world_size"] or 1) <= MAX_FINE_RECORDS:
        return MAX_COLUMNS
    return max(1, num_steps // SUMMARY_STEPS)


def health_map(
    conn: Connection,
    run: RunRow,
    field: str,
    operand: str = "",
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 400,
) -> dict[str, Any]:
    """{field, stride, steps, rows: [{label, modules, values, sites}], sites: {id: [module, operand, direction]}, marks}.

    `values[j]` is the worst value of a row in column j and `sites[j]` the site that had it. `marks` is
    [[row, column, site, text]]: non-finite elements on every map, and values that are no numbers.
    """
    run_id = run["id"]
    asked = _asked(run, field, from_step, to_step, min(points, _affordable(run, from_step, to_step)))
    found = queries.heatmap(conn, run_id, deviation.OF.get(field, field), *asked)
    of_count = field == "num_nonfinite"
    bad = found if of_count else queries.heatmap(conn, run_id, "num_nonfinite", *asked)
    found, grid = _deviations(found, from_step or 0) if field in deviation.OF else (found, _grid(found))
    num_bad = _aligned(found, bad)
    probes = queries.probes(conn, run_id) if of_quantiser(field) else frozenset[int]()
    shown = [
        i
        for i, s in enumerate(found["sites"])
        if (not operand or s["operand"] == operand) and (int(s["id"]) not in probes or num_bad[i].any())
    ]
    ids = [int(s["id"]) for s in found["sites"]]
    sign = 1.0 if field in SERIES_FIELDS and SERIES_FIELDS[field].worst == "min" else -1.0
    rows: list[dict[str, Any]] = []
    marks: list[list[Any]] = []
    for r, row in enumerate(rows_of([found["sites"][i] for i in shown])):
        of_row = np.array([shown[i] for i in row.sites])
        values = grid.values[of_row]
        worst = np.argmin(np.where(np.isnan(values), np.inf, sign * values), axis=0)
        there = (~np.isnan(values)).any(axis=0).tolist()
        at = of_row[worst].tolist()
        cells = [float(grid.values[i, j]) if there[j] else None for j, i in enumerate(at)]
        names = [ids[i] if there[j] else None for j, i in enumerate(at)]
        rows.append({"label": row.label, "modules": row.num_modules, "values": cells, "sites": names})
        marks += [[r, j, ids[i], text] for j, (i, text) in sorted(_marks(grid, num_bad, of_row).items())]
    marks = marks[:MAX_MARKS]
    named = {i for row_ in rows for i in row_["sites"]} | {mark[2] for mark in marks}
    sites = {str(s["id"]): [s["module"], s["operand"], s["direction"]] for s in found["sites"] if s["id"] in named}
    return {
        "field": field,
        "stride": found["stride"],
        "steps": found["steps"],
        "rows": rows,
        "sites": sites,
        "marks": marks,
    }


def _asked(
    run: RunRow, field: str, low: int | None, high: int | None, points: int
) -> tuple[int | None, int | None, int]:
    """Steps and number of columns that are asked for, of whatever is laid side by side: columns of one width begin together.

    Before the first step shown lies what says what is usual: a map of deviations asks for that as well.
    """
    if field not in deviation.OF:
        return low, high, points
    points = min(points, max(deviation.LEAST_COLUMNS, deviation.MAX_CELLS // max(1, int(run["num_sites"]))))
    first, last = low or 0, min(int(run["last_step"] or 0), high if high is not None else 1 << 62)
    before = deviation.WINDOW * max(1, (last - first + 1) // points) if first else 0
    return max(0, first - before), high, points + (deviation.WINDOW if before else 0)


def _deviations(found: dict[str, Any], first: int) -> tuple[dict[str, Any], _Grid]:
    """A heatmap from its first step shown on, and how far its values lie from what was usual."""
    grid = _grid(found)
    far = deviation.of_sites(found["field"], grid.values, found["sites"])
    shown = np.array([step >= first for step in found["steps"]], dtype=bool)
    special = {i: {j: what for j, what in row.items() if shown[j]} for i, row in grid.special.items()}
    drop = int((~shown).sum())
    special = {i: {j - drop: what for j, what in row.items()} for i, row in special.items() if row}
    steps = [step for step in found["steps"] if step >= first]
    return {**found, "steps": steps}, _Grid(far[:, shown], special)


def unusual_now(conn: Connection, run: RunRow) -> dict[int, tuple[int, float]]:
    """Site -> step and deviation of its amax where that was largest in the newest steps."""
    last, num_sites = run["last_step"], max(1, int(run["num_sites"]))
    if last is None:
        return {}
    window = min(NOW_STEPS + deviation.WINDOW, max(deviation.LEAST + 2, NOW_CELLS // num_sites))
    found = queries.heatmap(conn, run["id"], "amax_max", max(0, int(last) - window + 1), None, window)
    if not found["steps"]:
        return {}
    far = deviation.of_sites("amax_max", _grid(found).values, found["sites"])[:, -NOW_STEPS:]
    steps = found["steps"][-NOW_STEPS:]
    worst = np.argmax(np.nan_to_num(far, nan=-1.0), axis=1)
    at = [(int(s["id"]), int(j), float(far[i, j])) for i, (s, j) in enumerate(zip(found["sites"], worst, strict=True))]
    return {site: (steps[j], value) for site, j, value in at if value == value}


def _marks(grid: _Grid, num_bad: Floats, of_row: npt.NDArray[np.int64]) -> dict[int, tuple[int, str]]:
    """Column -> site (as a row of the heatmap) and its text."""
    out: dict[int, tuple[int, str]] = {}
    for i in of_row.tolist():
        out |= {j: (i, text) for j, text in grid.special.get(i, {}).items() if j not in out}
    counts = num_bad[of_row]
    for j in np.flatnonzero(counts.any(axis=0)).tolist():
        k = int(np.argmax(counts[:, j]))
        n = int(counts[k, j])
        out[j] = (int(of_row[k]), f"{n} non-finite element{'' if n == 1 else 's'}")
    return out
