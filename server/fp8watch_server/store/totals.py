"""Running totals and newest values of every site, so that /metrics never opens a body.

Upstream:   fp8watch_server.pipeline.detect_worker
Downstream: fp8watch_server.observability.site_metrics (table site_total)
Shapes:     batches of one run -> one site_total row per site
Thread:     detect worker, in the transaction that marks the batches
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import FIELD_BY_NAME
from fp8watch_agent.wire import Batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate

NEWEST_FIELDS = ("underflow_ratio", "amax_max", "scale_inv_max", "scale_inv_min", "tile_sqnr_db")
TOTAL_FIELDS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles")


def add_totals(conn: Connection, run_id: str, tenant: str, batches: Sequence[tuple[Batch, int]]) -> None:
    """Add batches with their attempts. Each batch is added once: the caller's transaction marks them."""
    batches = [(batch, attempt) for batch, attempt in batches if len(batch.site)]
    if not batches:
        return
    needs = sorted({name for f in (*NEWEST_FIELDS, *TOTAL_FIELDS) for name in SERIES_FIELDS[f].needs} | {"measured"})
    columns = {name: _side_by_side(name, [batch for batch, _ in batches]) for name in needs}
    site = np.concatenate([batch.site for batch, _ in batches])
    step = np.concatenate([batch.step for batch, _ in batches])
    attempt = np.concatenate([np.full(len(batch.site), attempt, dtype=np.int64) for batch, attempt in batches])
    order = np.lexsort((step, attempt, site))
    site, step, attempt = site[order], step[order], attempt[order]
    ids, starts = np.unique(site, return_index=True)
    last = np.r_[starts[1:], len(site)] - 1
    at = np.searchsorted(ids, site)  # of each record, the place of its site
    rows: list[dict[str, Any]] = [
        {"run_id": run_id, "tenant": tenant, "site": i, "attempt": a, "last_step": s, "newest": {}}
        for i, a, s in zip(ids.tolist(), attempt[last].tolist(), step[last].tolist(), strict=True)
    ]
    for name in TOTAL_FIELDS:
        values, present = evaluate(SERIES_FIELDS[name], columns)
        sums = np.add.reduceat(np.where(present, values, 0)[order], starts)
        for row, total in zip(rows, sums.tolist(), strict=True):
            row[name] = max(int(total), 0)  # a total never decreases
    for name in NEWEST_FIELDS:
        values, present = evaluate(SERIES_FIELDS[name], columns)
        kept = np.flatnonzero(present[order])
        if not len(kept):
            continue
        here = np.stack([at[kept], attempt[kept], step[kept]])  # not every field is measured in every step
        first = np.flatnonzero(np.r_[True, (here[:, 1:] != here[:, :-1]).any(axis=0)])
        worst = np.minimum if SERIES_FIELDS[name].worst == "min" else np.maximum  # over ranks; NaN wins
        with np.errstate(invalid="ignore"):
            of_step = worst.reduceat(values[order][kept].astype(np.float64), first)
        of_site = here[0, first]
        newest = np.flatnonzero(np.r_[of_site[1:] != of_site[:-1], True])
        for k, value in zip(of_site[newest].tolist(), of_step[newest].tolist(), strict=True):
            rows[k]["newest"][name] = value
    _add(conn, run_id, tenant, rows)


def _side_by_side(name: str, batches: Sequence[Batch]) -> npt.NDArray[Any]:
    if not any(name in batch.sent for batch in batches):
        f = FIELD_BY_NAME[name]
        return np.full(sum(len(batch.site) for batch in batches), f.default, f.dtype)
    return np.concatenate([batch.column(name) for batch in batches])


def _add(conn: Connection, run_id: str, tenant: str, rows: list[dict[str, Any]]) -> None:
    c, r = t.site_total.c, t.run.c
    at = conn.execute(
        sa.select(r.last_step_attempt, r.last_step).where(
            r.run_id == run_id, r.tenant == tenant, r.last_step.is_not(None)
        )
    ).first()
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
        elif here > newest or (at is not None and newest > tuple(at)):  # beyond the run's last step: training went back
            row["newest"] = {**old.newest, **row["newest"]}
        else:  # a late step
            row["attempt"], row["last_step"] = newest
            row["newest"] = {**row["newest"], **old.newest}
    upsert(conn, t.site_total, rows)


def worse(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The worse of two ranks' values: NaN, else the larger, or the smaller where small is bad."""
    out = dict(a)
    for name, value in b.items():
        pair = [float(v) for v in (out.get(name, value), value)]
        if any(v != v for v in pair):
            out[name] = "nan"
        else:
            out[name] = min(pair) if SERIES_FIELDS[name].worst == "min" else max(pair)
    return out
