"""Scalars per step (loss, grad norm, lr, logged values), merged over ranks, and their blocks.

Shapes:     rows of `scalar` -> steps [N], values [N], present [N]; 256 steps of them in one scalar_block
Thread:     query pool (read), compactor (write)

Over ranks a scalar is the mean of the ranks that gave one; a NaN on any rank makes it NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.store.attempts import counting, fewer_ranks
from fp8watch_server.store.block_codec import Column, Packed, pack
from fp8watch_server.store.fields import FieldError
from fp8watch_server.store.hot_batches import step_range
from fp8watch_server.store.reading import Extent
from fp8watch_server.store.rolled_past import newest_past, past_of

Array = npt.NDArray[Any]
Scalars = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]

_FETCHED = np.dtype(
    [*((name, "<i8") for name in ("rank", "step", "attempt", "seq")), ("value", "<f8"), ("kind", "<f8")]
)
"""A row of a scalar; class NaN: absent. Steps and seqs use all of their 63 bits."""
_OF_CLASS = np.array([0.0, np.nan, np.inf, -np.inf])
TABLE: dict[str, Column] = {
    "first": Column(0, "<i8"),
    "gap": Column(1, "<i8"),
    **{name: Column(2 + 2 * i, "<f8") for i, name in enumerate(t.SCALAR_NAMES)},
    **{f"{name}_present": Column(3 + 2 * i, "<u1") for i, name in enumerate(t.SCALAR_NAMES)},
}


def _merged(rows: Array) -> Scalars:
    """Merge [N] of _FETCHED to one row per step."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)
    rows = rows[np.lexsort((rows["seq"], rows["attempt"], rows["rank"], rows["step"]))]
    rank, step = rows["rank"], rows["step"]
    last = np.ones(len(rows), dtype=bool)
    last[:-1] = (step[1:] != step[:-1]) | (rank[1:] != rank[:-1])
    step, rows = step[last], rows[last]
    kinds = rows["kind"]
    present = ~np.isnan(kinds)
    of_class = _OF_CLASS[np.where(present, kinds, 0).astype(np.int64)]
    values = np.where(present, np.where(kinds == 0, rows["value"], of_class), 0.0)
    starts = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]]))
    num = np.add.reduceat(present.astype(np.int64), starts)
    with np.errstate(invalid="ignore", over="ignore"):  # Inf − Inf is NaN, and may be
        mean = np.add.reduceat(values, starts) / np.maximum(num, 1)
    return step[starts], mean, num > 0


def _fetch(
    conn: Connection, table: sa.Table, of_run: tuple[str, str], names: Sequence[str], where: Sequence[Any]
) -> dict[str, Array]:
    """Rows of a run for some columns that have a class, in one statement: one snapshot."""
    c = table.c
    wanted = [c[column] for name in names for column in (name, f"{name}_class")]
    this = (c.run_id == of_run[0], c.tenant == of_run[1], *where)
    rows = conn.execute(sa.select(c.rank, c.step, c.attempt, c.seq, *wanted).where(*this)).all()
    out = {
        name: np.array([(*row[:4], row[at], row[at + 1]) for row in rows], dtype=_FETCHED)
        for at, name in zip(range(4, 4 + 2 * len(names), 2), names, strict=True)
    }
    some = out[names[0]]
    if len(some) and some["attempt"].min() < some["attempt"].max():
        counts = counting(fewer_ranks(conn, *of_run), some["rank"], some["step"], some["attempt"])
        out = {name: of_name[counts] for name, of_name in out.items()}
    return out


def read_scalars(conn: Connection, found: Extent, name: str, rank: int | None) -> Scalars:
    """One of the four scalars between two steps; of one rank, or over all."""
    return read_several(conn, found, [name], rank)[name]


def read_several(conn: Connection, found: Extent, names: Sequence[str], rank: int | None) -> dict[str, Scalars]:
    """Several of the four scalars, unpacking each block once."""
    c = t.scalar.c
    of_run, where = (found.run_id, found.tenant), [c.step >= found.from_step, c.step <= found.to_step]
    if rank is not None:
        of_rank = _fetch(conn, t.scalar, of_run, names, [*where, c.rank == rank])
        return {name: _merged(rows) for name, rows in of_rank.items()}
    closed = sorted(cell.step0 for cells in found.closed.values() for cell in cells)
    packed = _packed(conn, found, names, closed)
    done = np.array(sorted(packed), dtype=np.int64)
    if packed and (done[0] <= found.from_step or not _any_before(conn, found, int(done[0]))):
        where.append(c.step >= _end_of_prefix(done))
    without = [cell for cell in found.open if cell.kept != t.KEPT_DETAIL or past_of(cell)]
    past = {cell.step0: newest_past(conn, found.run_id, found.tenant, cell) for cell in without}
    rolled = _packed(conn, found, names, sorted(past))
    out = {}
    for name, loose in _fetch(conn, t.scalar, of_run, names, where).items():
        if packed and len(loose):
            loose = loose[~np.isin(loose["step"] // t.BLOCK_STEPS * t.BLOCK_STEPS, done)]
        parts = [of_cell[name] for of_cell in packed.values()]
        for step0, of_cell in rolled.items():
            here = loose["step"] // t.BLOCK_STEPS * t.BLOCK_STEPS == step0
            parts.append(_renewed(of_cell[name], loose[here], past[step0]))
            loose = loose[~here]
        parts.append(_merged(loose))
        step, values, present = (np.concatenate([p[i] for p in parts]) for i in range(3))
        order = np.argsort(step, kind="stable")
        order = order[(step[order] >= found.from_step) & (step[order] <= found.to_step)]
        out[name] = step[order], values[order], present[order]
    return out


def _renewed(rolled: Scalars, rows: Array, past: int) -> Scalars:
    """A packed cell with the steps that attempts after `past` computed again: of the others some ranks' rows have gone."""
    steps = rolled[0]
    fresh = _merged(rows[(rows["attempt"] > past) | ~np.isin(rows["step"], steps)])
    stay = ~np.isin(steps, fresh[0])
    both = [np.concatenate([a[stay], b]) for a, b in zip(rolled, fresh, strict=True)]
    order = np.argsort(both[0], kind="stable")
    return both[0][order], both[1][order], both[2][order]


def _end_of_prefix(done: npt.NDArray[np.int64]) -> int:
    """Step up to which cells are contiguous."""
    breaks = np.flatnonzero(np.diff(done) != t.BLOCK_STEPS)
    return int(done[breaks[0] if len(breaks) else -1]) + t.BLOCK_STEPS


def _any_before(conn: Connection, found: Extent, step: int) -> bool:
    c = t.scalar.c
    query = sa.select(c.step).where(
        c.run_id == found.run_id, c.tenant == found.tenant, c.step >= found.from_step, c.step < step
    )
    return conn.execute(query.limit(1)).first() is not None


def _packed(conn: Connection, found: Extent, names: Sequence[str], closed: list[int]) -> dict[int, dict[str, Scalars]]:
    if not closed:
        return {}
    c = t.scalar_block.c
    wanted = set(closed)
    rows = conn.execute(
        sa.select(c.step0, c.body).where(
            c.run_id == found.run_id, c.tenant == found.tenant, c.step0 >= closed[0], c.step0 <= closed[-1]
        )
    )
    return {step0: _unpack(bytes(body), step0, names) for step0, body in rows if step0 in wanted}


def _unpack(body: bytes, step0: int, names: Sequence[str]) -> dict[str, Scalars]:
    block = Packed(body, TABLE)
    gaps = block.column("gap").copy()
    gaps[0] = block.column("first")[0]
    steps = np.cumsum(gaps) + step0
    return {
        name: (steps, block.column(name).astype(np.float64), block.column(f"{name}_present").astype(bool))
        for name in names
    }


def put_scalar_block(conn: Connection, run_id: str, tenant: str, step0: int, past: int = 0) -> None:
    """Pack the scalars of a cell, over ranks. Of attempts up to `past` what was packed before stays."""
    c, packed = t.scalar.c, t.scalar_block.c
    before = None
    if past:
        this = (packed.run_id == run_id, packed.tenant == tenant, packed.step0 == step0)
        before = conn.execute(sa.select(packed.body).where(*this)).scalar()
    rolled = {} if before is None else _unpack(bytes(before), step0, t.SCALAR_NAMES)
    where = (c.step >= step0, c.step < step0 + t.BLOCK_STEPS)
    columns: dict[str, Array] = {}
    for name, fetched in _fetch(conn, t.scalar, (run_id, tenant), t.SCALAR_NAMES, where).items():
        steps, values, present = _renewed(rolled[name], fetched, past) if rolled else _merged(fetched)
        if not len(steps):
            return
        gaps = np.diff(steps, prepend=steps[0])
        gaps[0] = gaps[1] if len(gaps) > 1 else 0
        columns |= {"first": np.full((1, len(steps)), steps[0] - step0), "gap": gaps[None]}
        columns |= {name: values[None], f"{name}_present": present[None].astype(np.uint8)}
    (body,) = pack(columns, TABLE, (1, len(steps)))
    upsert(conn, t.scalar_block, [{"run_id": run_id, "tenant": tenant, "step0": step0, "body": body}])


def read_logged(
    conn: Connection,
    run_id: str,
    name: str,
    from_step: int | None,
    to_step: int | None,
    rank: int | None,
    *,
    tenant: str = t.DEFAULT_TENANT,
) -> Scalars:
    """Values of watch.log under a name.

    Raises:
        FieldError: a name that this run has not logged; the text lists those that it has.
    """
    c = t.logged.c
    low, high = step_range(from_step, to_step)
    where = [c.name == name, c.step >= low, c.step <= high]
    if rank is not None:
        where.append(c.rank == rank)
    rows = _fetch(conn, t.logged, (run_id, tenant), ["value"], where)["value"]
    if not len(rows):
        of_run = (c.run_id == run_id, c.tenant == tenant)
        names = set(conn.execute(sa.select(c.name).where(*of_run).distinct()).scalars())
        if name not in names:
            known = ", ".join([*t.SCALAR_NAMES, *sorted(names)])
            raise FieldError(f"scalar {name!r} is not known in this run; known are {known}")
    return _merged(rows)
