"""Charts: one site over steps, all sites over steps, the worst sites, histograms over steps.

Upstream:   fp8watch_server.store.hot, fp8watch_server.store.fields    Downstream: fp8watch_server.store.queries
Shapes:     Records -> lists that JSON can hold, with non-finite values as data
Thread:     query pool

Down-sampling keeps what matters: of every bucket its smallest, its largest and its first NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import FIELD_BY_NAME, NUM_AMAX_BUCKETS, NUM_DEPTH_BUCKETS

from . import schema as t
from .fields import FieldError, as_data, badness, evaluate, series_field
from .hot import batches, gather, step_range

MAX_POINTS = 10_000
MAX_HEATMAP_CELLS = 1 << 20
AMAX_BUCKET_OFFSET = 48
"""Bucket k = 1…63 of amax_hist holds floor(log2(amax / 1.75)) = k − 48; bucket 0 holds the zero tiles."""

Array = npt.NDArray[Any]


def thin(values: Array, present: npt.NDArray[np.bool_], points: int) -> tuple[Array, int]:
    """Indices of at most `points` of the values, ascending, and how many values a bucket held.

    Of every bucket: the smallest, the largest and the first NaN. An absent value is kept only where its whole
    bucket is absent, so that gaps stay gaps.
    """
    n = len(values)
    if n <= points:
        return np.arange(n), 1
    num_buckets = max(1, points // 3)
    stride = math.ceil(n / num_buckets)
    v = values.astype(np.float64)
    nan = np.isnan(v) & present
    keep: set[int] = set()
    for start in range(0, n, stride):
        part = np.arange(start, min(start + stride, n))
        numbers = part[present[part] & ~nan[part]]
        if len(numbers):
            keep.add(int(numbers[np.argmin(v[numbers])]))
            keep.add(int(numbers[np.argmax(v[numbers])]))
        first_nan = part[nan[part]]
        if len(first_nan):
            keep.add(int(first_nan[0]))
        elif not len(numbers):
            keep.add(start)
    return np.array(sorted(keep), dtype=np.int64), stride


def _points(points: int) -> int:
    return min(max(points, 3), MAX_POINTS)


def _chart(steps: Array, values: Array, present: npt.NDArray[np.bool_], points: int) -> dict[str, Any]:
    index, stride = thin(values, present, _points(points))
    data, nonfinite = as_data(values[index], present[index])
    return {"steps": steps[index].tolist(), "values": data, "nonfinite": nonfinite, "stride": stride}


def series(
    conn: Connection,
    run_id: str,
    site: int,
    field: str,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
    rank: int | None = None,
) -> dict[str, Any]:
    """One field of one site over steps: {site, field, unit, steps, values, nonfinite, stride}.

    `rank=None` merges the ranks as the field merges. Steps without a record are absent; a value that was not
    measured is null; NaN and ±Inf are null with an entry in `nonfinite`.

    Raises:
        FieldError: a field that nobody knows.
    """
    f = series_field(field)
    records = gather(conn, run_id, f.needs, sites=[site], from_step=from_step, to_step=to_step, rank=rank)
    values, present = evaluate(f, records.columns)
    return {"site": site, "field": field, "unit": f.unit, **_chart(records.step, values, present, points)}


def scalars(
    conn: Connection,
    run_id: str,
    name: str,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
    rank: int | None = None,
) -> dict[str, Any]:
    """Loss, grad_norm, lr, loss_scale, or a name given to watch.log, over steps: same shape as `series`, site null.

    `rank=None` takes the mean over the ranks that gave one; a NaN on any rank makes it NaN.

    Raises:
        FieldError: a name that this run has not logged.
    """
    if name in t.SCALAR_NAMES:
        found = _stored_scalars(conn, run_id, name, *step_range(from_step, to_step), rank)
    else:
        found = _logged(conn, run_id, name, *step_range(from_step, to_step), rank)
    by_step: dict[int, list[float]] = {}
    for (_, step), (_, value) in sorted(found.items()):
        by_step.setdefault(step, [])
        if value is not None:
            by_step[step].append(value)
    steps = np.array(sorted(by_step), dtype=np.int64)
    groups = [by_step[step] for step in steps.tolist()]
    with np.errstate(invalid="ignore"):  # Inf − Inf is NaN, and may be
        values = np.array([np.mean(g) if g else 0.0 for g in groups], dtype=np.float64)
    present = np.array([bool(g) for g in groups], dtype=bool)
    return {"site": None, "field": name, "unit": "", **_chart(steps, values, present, points)}


_OF_CLASS = {1: math.nan, 2: math.inf, 3: -math.inf}
_Newest = dict[tuple[int, int], tuple[tuple[int, int], float | None]]  # (rank, step) -> ((attempt, seq), value)


def _stored_scalars(
    conn: Connection, run_id: str, name: str, from_step: int, to_step: int, rank: int | None
) -> _Newest:
    c = t.scalar.c
    where = [c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.step >= from_step, c.step <= to_step]
    if rank is not None:
        where.append(c.rank == rank)
    rows = conn.execute(
        sa.select(c.rank, c.step, c.attempt, c.seq, c[name], c[f"{name}_class"]).where(*where).order_by(c.attempt)
    )
    found: _Newest = {}
    for rank_, step, attempt, seq, value, kind in rows:
        number = None if kind is None else value if kind == 0 else _OF_CLASS[kind]
        found[rank_, step] = ((attempt, seq), number)
    return found


def _logged(conn: Connection, run_id: str, name: str, from_step: int, to_step: int, rank: int | None) -> _Newest:
    found: _Newest = {}
    names: set[str] = set()
    for stored in batches(conn, run_id, from_step, to_step, rank=rank):
        h = stored.batch.header
        names.update(h.logs)
        values = h.logs.get(name)
        if values is None:
            continue
        for step, value in zip(stored.batch.steps["step"].tolist(), values, strict=True):
            key, age = (h.rank, step), (stored.attempt, h.seq)
            if from_step <= step <= to_step and (key not in found or found[key][0] <= age):
                found[key] = (age, value)
    if name not in names:
        known = ", ".join([*t.SCALAR_NAMES, *sorted(names)])
        raise FieldError(f"scalar {name!r} is not known in this run; known are {known}")
    return found


def top(
    conn: Connection, run_id: str, field: str, n: int = 10, from_step: int | None = None, to_step: int | None = None
) -> dict[str, Any]:
    """The n worst sites of a field: {field, unit, items: [{site, module, operand, direction, step, value, nonfinite}]}.

    Worst is the largest, or the smallest where small is bad (SQNR, minima); NaN is worse than all. `nonfinite` is
    null, or the name of the value that `value` then cannot hold.
    """
    f = series_field(field)
    records = gather(conn, run_id, f.needs, from_step=from_step, to_step=to_step)
    values, present = evaluate(f, records.columns)
    rank_of = np.where(present, badness(values, f.worst), -np.inf)
    facts = _site_facts(conn, run_id)
    worst: list[tuple[float, int, dict[str, Any]]] = []
    for start, end in _groups(records.site):
        at = start + int(np.argmax(rank_of[start:end]))
        site = int(records.site[at])
        if not present[at] or site not in facts:
            continue
        (value,), nonfinite = as_data(values[at : at + 1], present[at : at + 1])
        item = {**facts[site], "step": int(records.step[at]), "value": value}
        item["nonfinite"] = nonfinite[0][1] if nonfinite else None
        worst.append((float(rank_of[at]), item.pop("order"), item))
    worst.sort(key=lambda entry: (-entry[0], entry[1]))
    return {"field": field, "unit": f.unit, "items": [item for _, _, item in worst[: max(n, 0)]]}


def newest(
    conn: Connection,
    run_id: str,
    fields: Sequence[str],
    from_step: int | None = None,
    to_step: int | None = None,
    sites: Sequence[int] | None = None,
) -> dict[int, dict[str, tuple[int, Any]]]:
    """Of each site, the newest measured (step, value) of each field; a non-finite value as its name.

    Fields may come from different steps: between two full samples a broken site sends only a part of its record.
    """
    asked = [series_field(name) for name in fields]
    needs = {column for f in asked for column in f.needs}
    records = gather(conn, run_id, needs, sites=sites, from_step=from_step, to_step=to_step)
    out: dict[int, dict[str, tuple[int, Any]]] = {}
    groups = _groups(records.site)
    for f in asked:
        values, present = evaluate(f, records.columns)
        for start, end in groups:
            measured = np.flatnonzero(present[start:end])
            if len(measured):
                at = start + int(measured[-1])
                (value,), nonfinite = as_data(values[at : at + 1], present[at : at + 1])
                cell = (int(records.step[at]), nonfinite[0][1] if nonfinite else value)
                out.setdefault(int(records.site[at]), {})[f.name] = cell
    return out


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
    them, and `steps[j]` is its first. `nonfinite` is [[i, j, "nan" | "inf" | "-inf"], …].
    """
    f = series_field(field)
    records = gather(conn, run_id, f.needs, from_step=from_step, to_step=to_step)
    values, present = evaluate(f, records.columns)
    facts = _site_facts(conn, run_id)
    seen = set(np.unique(records.site).tolist())
    rows = [site for site in facts if site in seen]
    all_steps = np.unique(records.step)
    columns = min(_points(points), max(1, MAX_HEATMAP_CELLS // max(1, len(rows))))
    stride = max(1, math.ceil(len(all_steps) / columns))
    steps = all_steps[::stride]
    grid = np.zeros((len(rows), len(steps)), dtype=np.float64)
    shown = np.zeros(grid.shape, dtype=bool)
    if len(rows) and len(steps):
        place = {site: i for i, site in enumerate(rows)}
        i = np.array([place.get(s, -1) for s in records.site.tolist()], dtype=np.int64)
        j = np.searchsorted(all_steps, records.step) // stride
        take = np.flatnonzero(present & (i >= 0))
        take = take[np.argsort(badness(values[take], f.worst), kind="stable")]  # the worst is written last
        grid[i[take], j[take]] = values[take]
        shown[i[take], j[take]] = True
    flat, marks = as_data(grid.reshape(-1), shown.reshape(-1))
    width = len(steps)
    return {
        "field": field,
        "unit": f.unit,
        "sites": [{k: v for k, v in facts[site].items() if k != "order"} | {"id": site} for site in rows],
        "steps": steps.tolist(),
        "values": [flat[r * width : (r + 1) * width] for r in range(len(rows))],
        "nonfinite": [[k // width, k % width, name] for k, name in marks],
        "stride": stride,
    }


def histogram_buckets(field: str) -> list[str]:
    """Names of the buckets: the power of two at a bucket's foot (times 1.75 for amax_hist), and "0" for zero tiles."""
    if field == "amax_hist":
        return ["0", *(f"2^{k - AMAX_BUCKET_OFFSET}" for k in range(1, NUM_AMAX_BUCKETS))]
    return [f"2^-{k}" for k in range(NUM_DEPTH_BUCKETS)]


def histogram(
    conn: Connection,
    run_id: str,
    site: int,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 200,
    field: str = "amax_hist",
) -> dict[str, Any]:
    """A histogram of one site over steps: {site, field, steps, buckets, counts, stride}; counts[j][k] of column j.

    A column that holds several steps shows their sum. Steps in which it was not measured are absent. Counts come from
    codes on the wire and are right within 4.4 %.
    """
    if field not in ("amax_hist", "depth_hist"):
        raise FieldError(f"histogram {field!r} is not known; known are amax_hist, depth_hist")
    records = gather(conn, run_id, [field], sites=[site], from_step=from_step, to_step=to_step)
    group = int(FIELD_BY_NAME[field].group)
    kept = (records.columns["measured"] & group) == group
    steps, counts = records.step[kept], records.columns[field][kept]
    stride = max(1, math.ceil(len(steps) / _points(points)))
    if len(steps):
        counts = np.add.reduceat(counts, np.arange(0, len(steps), stride), axis=0)
    return {
        "site": site,
        "field": field,
        "steps": steps[::stride].tolist(),
        "buckets": histogram_buckets(field),
        "counts": np.rint(counts).astype(np.int64).tolist(),
        "stride": stride,
    }


def _groups(sorted_ids: Array) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(sorted_ids.astype(np.int64))) + 1
    starts = [0, *edges.tolist()] if len(sorted_ids) else []
    return list(zip(starts, [*starts[1:], len(sorted_ids)], strict=True)) if starts else []


def _site_facts(conn: Connection, run_id: str) -> dict[int, dict[str, Any]]:
    c = t.site.c
    rows = conn.execute(
        sa.select(c.site, c.module, c.operand, c.direction, c.flow_order)
        .where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
        .order_by(c.flow_order, c.module, c.operand, c.direction)
    )
    return {s: {"site": s, "module": m, "operand": o, "direction": d, "order": f} for s, m, o, d, f in rows}
