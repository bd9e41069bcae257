"""One side of a comparison: a run, or one rank of it, as arrays.

Shapes:     run, rank -> loss [T] over its steps; log2 amax [S, T] of some sites over some steps
Thread:     query pool
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import Measured, holds
from fp8watch_server.db import schema as t
from fp8watch_server.store.hot_batches import step_range
from fp8watch_server.store.reading import extent, gather
from fp8watch_server.store.scalars import read_several

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

LOG2_OF_ZERO = -160.0
"""Stands for the log2 of an amax of 0: below that of every float32."""


@dataclass(frozen=True)
class Side:
    """A run; all of its ranks merged, or one of them."""

    run_id: str
    rank: int | None = None


@dataclass(frozen=True)
class Scalar:
    """A scalar over steps."""

    steps: Steps  # [T], ascending
    values: Floats  # [T]; NaN and ±Inf are data
    present: npt.NDArray[np.bool_]  # [T]


@dataclass(frozen=True)
class Amax:
    """Amax of some sites over some steps."""

    level: Floats  # log2 of the largest tile amax [S, T]; NaN where it was not measured, or not finite
    bad: npt.NDArray[np.bool_]  # [S, T]: NaN or Inf among its elements
    measured: npt.NDArray[np.bool_]  # [S, T]


def scalars_of(
    conn: Connection, side: Side, names: Sequence[str], from_step: int | None, to_step: int | None
) -> dict[str, Scalar]:
    """Loss and the like of a side."""
    found = read_several(conn, extent(conn, side.run_id, from_step, to_step), names, side.rank)
    return {name: Scalar(*found[name]) for name in names}


def amax_of(conn: Connection, side: Side, sites: Sequence[int], steps: Steps) -> Amax:
    """Amax of sites, as rows, at steps, as columns, in the order in which they are given (steps ascending)."""
    shape = (len(sites), len(steps))
    level, bad, measured = np.full(shape, np.nan), np.zeros(shape, bool), np.zeros(shape, bool)
    if not shape[0] or not shape[1]:
        return Amax(level, bad, measured)
    names = ("amax_max", "num_nan", "num_inf")
    got = gather(conn, side.run_id, names, from_step=int(steps[0]), to_step=int(steps[-1]), rank=side.rank)
    known = np.array(sites, dtype=np.uint64)
    order = np.argsort(known)
    i = np.minimum(np.searchsorted(known, got.site, sorter=order), len(known) - 1)
    j = np.minimum(np.searchsorted(steps, got.step), len(steps) - 1)
    row = order[i]
    take = (known[row] == got.site) & (steps[j] == got.step) & holds(got.columns["measured"], Measured.AMAX)
    row, j = row[take], j[take]
    amax = got.columns["amax_max"][take].astype(np.float64)
    counted = holds(got.columns["measured"][take], Measured.COUNTS)
    broken = ~np.isfinite(amax) | (counted & ((got.columns["num_nan"][take] + got.columns["num_inf"][take]) > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        log2 = np.where(amax > 0, np.log2(amax), LOG2_OF_ZERO)
    level[row, j] = np.where(np.isfinite(amax), log2, np.nan)
    bad[row, j] = broken
    measured[row, j] = True
    return Amax(level, bad, measured)


def batch_ids(conn: Connection, side: Side, from_step: int | None, to_step: int | None) -> dict[int, frozenset[str]]:
    """Step -> the names that its data were given, of rank 0 where all are merged; steps without any are left out."""
    c = t.scalar.c
    low, high = step_range(from_step, to_step)
    where = [c.run_id == side.run_id, c.tenant == t.DEFAULT_TENANT, c.step >= low, c.step <= high]
    where += [c.batch_id.is_not(None), c.rank == (side.rank or 0)]
    out: dict[int, set[str]] = {}
    for step, name in conn.execute(sa.select(c.step, c.batch_id).where(*where).distinct()):
        out.setdefault(int(step), set()).add(str(name))
    return {step: frozenset(names) for step, names in out.items()}
