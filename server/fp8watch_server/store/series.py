"""Chart data over steps: one site's field, scalars, histograms; and down-sampling.

Upstream:   fp8watch_server.store.reading
Downstream: fp8watch_server.store.queries
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
from sqlalchemy.engine import Connection

from fp8watch_agent.record import AMAX_BUCKET_OFFSET, FIELD_BY_NAME, NUM_AMAX_BUCKETS, NUM_DEPTH_BUCKETS, holds
from fp8watch_server.db import schema as t
from fp8watch_server.store.fields import FieldError, SeriesField, as_data, badness, evaluate, series_field
from fp8watch_server.store.reading import extent, gather, num_steps
from fp8watch_server.store.records import Records
from fp8watch_server.store.scalars import read_logged, read_scalars, read_several
from fp8watch_server.store.summary import worst_of_each

MAX_POINTS = 10_000
HISTOGRAMS_AT_ONCE = 1 << 15
"""Longer runs are summed in chunks of this many: a histogram has 64 numbers per step."""

Array = npt.NDArray[Any]


def thin(values: Array, present: npt.NDArray[np.bool_], points: int) -> tuple[Array, int]:
    """Indices of at most `points` values, ascending, and the number of values per bucket.

    Of every bucket: the smallest, the largest and the first NaN. An absent value is kept only where its whole
    bucket is absent, so that gaps stay gaps.
    """
    n = len(values)
    if n <= points:
        return np.arange(n), 1
    num_buckets = max(1, points // 3)
    stride = math.ceil(n / num_buckets)
    starts = np.arange(0, n, stride)
    nan = np.isnan(values.astype(np.float64)) & present
    number = present & ~nan
    lowest = worst_of_each(badness(values, number, "min"), starts)
    highest = worst_of_each(badness(values, number, "max"), starts)
    first_nan = np.minimum.reduceat(np.where(nan, np.arange(n), n), starts)
    any_number = np.logical_or.reduceat(number, starts)
    keep = [lowest[any_number], highest[any_number], first_nan[first_nan < n]]
    keep.append(starts[~any_number & (first_nan == n)])
    return np.unique(np.concatenate(keep)).astype(np.int64), stride


def clamp_points(points: int) -> int:
    """Limit a number of points to what can be drawn."""
    return min(max(points, 3), MAX_POINTS)


def _chart(
    steps: Array, values: Array, present: npt.NDArray[np.bool_], points: int, back: dict[str, Array] | None = None
) -> dict[str, Any]:
    """`back`: names of lists of steps besides `steps`, and how far before these they lie."""
    index, stride = thin(values, present, clamp_points(points))
    data, nonfinite = as_data(values[index], present[index])
    more = {name: (steps[index] - by[index]).tolist() for name, by in (back or {}).items()}
    return {"steps": steps[index].tolist(), "values": data, "nonfinite": nonfinite, "stride": stride, **more}


def _needs(fields: Sequence[SeriesField]) -> set[str]:
    """Columns of some fields, and those that say which steps their points stand for."""
    needs = {column for f in fields for column in f.needs} | {"window_steps_back"}
    return needs | {"amax_steps_back"} if any(f.name == "amax_max" for f in fields) else needs


def _chart_of(f: SeriesField, records: Records, points: int) -> dict[str, Any]:
    """The chart of a field. Where records stand for several steps, with the first of these, and the step of the largest amax."""
    columns = records.columns
    back = {"from_steps": columns["window_steps_back"]} if columns["window_steps_back"].any() else {}
    if back and f.name == "amax_max":
        back["at_steps"] = columns["amax_steps_back"]
    return _chart(records.step, *evaluate(f, columns), points, back)


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
    measured is null; NaN and ±Inf are null with an entry in `nonfinite`. `rounded_within` is there where light records in
    order are rounded, as the largest relative error. `from_steps` is there where records stand for several steps (many
    ranks): of each point the first of the steps whose extremes and sums it has, its own being the last; over ranks, the
    first of any rank's. `at_steps`, of amax_max, is the step of that amax.

    Raises:
        FieldError: a field that nobody knows.
    """
    f = series_field(field)
    records = gather(conn, run_id, _needs([f]), sites=[site], from_step=from_step, to_step=to_step, rank=rank)
    return {"site": site, **f.said, **_chart_of(f, records, points)}


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
        found = read_scalars(conn, extent(conn, run_id, from_step, to_step), name, rank)
    else:
        found = read_logged(conn, run_id, name, from_step, to_step, rank)
    steps, values, present = found
    return {"site": None, "field": name, "unit": "", **_chart(steps, values, present, points)}


def several_scalars(
    conn: Connection,
    run_id: str,
    names: Sequence[str],
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
) -> dict[str, dict[str, Any]]:
    """Several scalars over steps and ranks: what `scalars` gives, by name, in one read."""
    found = read_several(conn, extent(conn, run_id, from_step, to_step), names, None)
    return {name: {"site": None, "field": name, "unit": "", **_chart(*found[name], points)} for name in names}


def several_series(
    conn: Connection,
    run_id: str,
    site: int,
    fields: Sequence[str],
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
) -> dict[str, dict[str, Any]]:
    """Several fields of one site over steps and ranks: what `series` gives, by name, in one read.

    Raises:
        FieldError: a field that nobody knows.
    """
    known = [series_field(name) for name in fields]
    records = gather(conn, run_id, _needs(known), sites=[site], from_step=from_step, to_step=to_step)
    return {f.name: {"site": site, **f.said, **_chart_of(f, records, points)} for f in known}


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

    def read(names: Sequence[str], low: int | None, high: int | None) -> tuple[Array, dict[str, Array]]:
        records = gather(conn, run_id, names, sites=[site], from_step=low, to_step=high)
        kept = holds(records.columns["measured"], FIELD_BY_NAME[field].group)
        return records.step[kept], {name: records.columns[name][kept] for name in names}

    at_once = num_steps(extent(conn, run_id, from_step, to_step)) <= HISTOGRAMS_AT_ONCE
    steps, columns = read([field] if at_once else [], from_step, to_step)
    stride = max(1, math.ceil(len(steps) / clamp_points(points)))
    firsts = steps[::stride]
    counts = np.zeros((len(firsts), FIELD_BY_NAME[field].size), dtype=np.int64)
    for start in range(0, len(steps), HISTOGRAMS_AT_ONCE):
        part = steps[start : start + HISTOGRAMS_AT_ONCE]
        of_part, columns = (steps, columns) if at_once else read([field], int(part[0]), int(part[-1]))
        column = np.searchsorted(firsts, of_part, "right") - 1
        begin = np.flatnonzero(np.diff(column, prepend=-1))
        counts[column[begin]] += np.add.reduceat(columns[field], begin, axis=0)  # integers: exact in any order
    return {
        "site": site,
        "field": field,
        "steps": firsts.tolist(),
        "buckets": histogram_buckets(field),
        "counts": counts.tolist(),
        "stride": stride,
    }


def _groups(sorted_ids: Array) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(sorted_ids.astype(np.int64))) + 1
    starts = [0, *edges.tolist()] if len(sorted_ids) else []
    return list(zip(starts, [*starts[1:], len(sorted_ids)], strict=True)) if starts else []
