"""Running totals and newest values of every site: what /metrics reads, so that it never opens a body.

Upstream:   fp8watch_server.worker    Downstream: fp8watch_server.metrics
Shapes:     one Batch -> one site_total row per site
Thread:     detect worker, in the transaction that marks the batch
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.wire import Batch

from . import schema as t
from .dialect import upsert
from .fields import SERIES_FIELDS, as_data, evaluate

NEWEST_FIELDS = ("underflow_ratio", "amax_max", "scale_inv_max", "scale_inv_min", "tile_sqnr_db")
TOTAL_FIELDS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles")


def add_totals(conn: Connection, batch: Batch, attempt: int, tenant: str) -> None:
    """Add one batch. Called once per batch: the caller's transaction marks it."""
    if not len(batch.site):
        return
    run_id = batch.header.run
    needs = {name for f in (*NEWEST_FIELDS, *TOTAL_FIELDS) for name in SERIES_FIELDS[f].needs}
    columns = {name: batch.column(name) for name in (*needs, "measured")}
    values = {name: evaluate(SERIES_FIELDS[name], columns) for name in (*NEWEST_FIELDS, *TOTAL_FIELDS)}
    order = np.lexsort((batch.step, batch.site))
    sites = batch.site[order]
    starts = np.flatnonzero(np.r_[True, sites[1:] != sites[:-1]])
    ends = np.r_[starts[1:], len(sites)] - 1
    sums = {
        name: np.add.reduceat(np.where(values[name][1], values[name][0], 0)[order], starts).tolist()
        for name in TOTAL_FIELDS
    }
    last = order[ends]
    newest: list[dict[str, Any]] = [{} for _ in starts]
    for name in NEWEST_FIELDS:
        data, marks = as_data(values[name][0][last], values[name][1][last])
        for i, mark in marks:
            data[i] = mark
        for into, value in zip(newest, data, strict=True):
            if value is not None:
                into[name] = value
    rows = [
        {
            "run_id": run_id,
            "tenant": tenant,
            "site": site,
            **{name: max(int(sums[name][i]), 0) for name in TOTAL_FIELDS},  # a total never goes back
            "attempt": attempt,
            "last_step": step,
            "newest": newest[i],
        }
        for i, (site, step) in enumerate(zip(sites[starts].tolist(), batch.step[last].tolist(), strict=True))
    ]
    _add(conn, run_id, tenant, rows)


def _add(conn: Connection, run_id: str, tenant: str, rows: list[dict[str, Any]]) -> None:
    c = t.site_total.c
    known = {
        row.site: row for row in conn.execute(sa.select(t.site_total).where(c.run_id == run_id, c.tenant == tenant))
    }
    for row in rows:
        old = known.get(row["site"])
        if old is None:
            continue
        for name in TOTAL_FIELDS:
            row[name] = min(row[name] + getattr(old, name), (1 << 63) - 1)
        here, newest = (row["attempt"], row["last_step"]), (old.attempt, old.last_step)
        if here == newest:  # another rank's view of the same step
            row["newest"] = worse(old.newest, row["newest"])
        elif here > newest:
            row["newest"] = {**old.newest, **row["newest"]}  # not every group of fields is measured in every step
        else:  # it came late
            row["attempt"], row["last_step"] = newest
            row["newest"] = {**row["newest"], **old.newest}
    upsert(conn, t.site_total, rows)


def worse(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of two ranks' values the one that is worse: NaN, else the larger, or the smaller where small is bad."""
    out = dict(a)
    for name, value in b.items():
        pair = [float(v) for v in (out.get(name, value), value)]
        if any(v != v for v in pair):
            out[name] = "nan"
        else:
            out[name] = min(pair) if SERIES_FIELDS[name].worst == "min" else max(pair)
    return out
