"""Reconstructs past batches from blocks and hot batches, to show them to detectors again.

Shapes:     a run -> wire.Batch, of all ranks as they took turns, each rank's steps in order
Thread:     detect worker, main

The contents of a compacted body are in three places: records in blocks, steps in `scalar`, logged values in `logged`.
Blocks give batches of STEPS_A_PIECE steps, so that the ranks take turns as they did; these have negative sequence
numbers, which no agent's batch has. Only detail is returned: a cell reduced to its roll-up would look like one rank
that computes what all of them did.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS, STEP, STEP_SCALARS
from fp8watch_agent.wire import Batch, Header
from fp8watch_server.db import schema as t
from fp8watch_server.store import hot_batches
from fp8watch_server.store.cell_records import read_records
from fp8watch_server.store.reading import detail_keys
from fp8watch_server.store.records import Parts

STEPS_A_PIECE = 8
FIRST_SEQ = -(1 << 40)
"""Number of a source's first piece."""
_OF_CLASS = {1: float("nan"), 2: float("inf"), 3: float("-inf")}

Source = tuple[int, int]  # attempt, rank


@dataclass(frozen=True)
class PastBatch:
    """A past batch, its time and its source."""

    at: float
    attempt: int
    rank: int
    batch: Batch
    arrival: int | None  # of a hot batch


def batches(
    conn: Connection,
    run_id: str,
    tenant: str,
    *,
    where: Sequence[Any] = (),
    from_step: Callable[[Source], int | None] = lambda source: 0,
) -> Iterator[PastBatch]:
    """All batches of a run.

    Args:
        where: more conditions on hot_batch.
        from_step: of a source the first step whose block is given; None: none of them.
    """
    sources: dict[Source, list[Any]] = defaultdict(list)
    for cell in cells(conn, run_id, tenant):
        for attempt, rank in detail_keys(cell):
            first = from_step((attempt, rank))
            if first is not None and cell.step_max >= first:
                sources[attempt, rank].append(cell)
    s = t.session.c
    names = {
        (row.attempt, row.rank): row.session
        for row in conn.execute(sa.select(s.attempt, s.rank, s.session).where(s.run_id == run_id, s.tenant == tenant))
    }
    ways: list[Iterator[PastBatch]] = [
        _of_blocks(conn, (run_id, tenant), source, names[source], of_source)
        for source, of_source in sorted(sources.items())
        if source in names
    ]
    ways.append(_of_hot(conn, run_id, tenant, where))
    yield from heapq.merge(*ways, key=_when)


def _when(past: PastBatch) -> tuple[float, int]:
    """Sort key: clocks may stand still, so steps break ties."""
    return past.at, int(past.batch.steps["step"][0]) if len(past.batch.steps) else 0


def cells(conn: Connection, run_id: str, tenant: str) -> Sequence[Any]:
    """Cells with the detail of every rank."""
    c = t.cell.c
    of_run = (c.run_id == run_id, c.tenant == tenant, c.kept == t.KEPT_DETAIL)
    return conn.execute(sa.select(t.cell).where(*of_run).order_by(c.step0)).all()


def num_without_detail(conn: Connection, run_id: str, tenant: str) -> int:
    """Number of cells of 256 steps without detail, which are not returned."""
    c = t.cell.c
    where = (c.run_id == run_id, c.tenant == tenant, c.kept != t.KEPT_DETAIL)
    return int(conn.execute(sa.select(sa.func.count()).select_from(t.cell).where(*where)).scalar_one())


def num_samples(conn: Connection, run_id: str, tenant: str, source: Source, step0: int) -> int:
    """Number of steps with records of a source in a cell."""
    num = 0
    for c, of_site in ((t.sheet.c, t.sheet.c.max_records), (t.block.c, t.block.c.num_records)):
        key = (c.run_id == run_id, c.tenant == tenant, c.attempt == source[0], c.rank == source[1], c.step0 == step0)
        num = max(num, int(conn.execute(sa.select(sa.func.max(of_site)).where(*key)).scalar() or 0))
    return num


def _of_hot(conn: Connection, run_id: str, tenant: str, where: Sequence[Any]) -> Iterator[PastBatch]:
    b = t.hot_batch.c
    columns = (b.run_id, b.tenant, b.session, b.rank, b.seq, b.attempt, b.arrival, b.received_at, b.step_min)
    rows = conn.execute(
        sa.select(*columns).where(b.run_id == run_id, b.tenant == tenant, *where).order_by(b.arrival)
    ).all()
    at = 0.0
    for row in rows:
        batch = hot_batches.load(conn, row)
        if batch is not None:
            at = max(at, row.received_at)
            yield PastBatch(at, row.attempt, row.rank, _from(batch, row.step_min), row.arrival)


def _from(batch: Batch, step_min: int | None) -> Batch:
    """The part of a batch that is not in blocks yet."""
    steps = batch.steps["step"]
    if step_min is None or not len(steps) or int(steps[0]) >= step_min:
        return batch
    kept, first = batch.step >= step_min, int(np.searchsorted(steps, step_min))
    sent = {name: values[kept] for name, values in batch.sent.items()}
    header = msgspec.structs.replace(
        batch.header,
        step0=step_min,
        num_steps=len(steps) - first,
        num_records=int(kept.sum()),
        logs={name: values[first:] for name, values in batch.header.logs.items()},
        batch_ids=batch.header.batch_ids[first:],
    )
    experts = [v for v in batch.experts if v.step >= step_min]
    return Batch(header, batch.steps[first:], batch.step[kept], batch.site[kept], sent, experts)


def _of_blocks(
    conn: Connection, of_run: tuple[str, str], source: Source, session: str, of_source: Sequence[Any]
) -> Iterator[PastBatch]:
    at, seq = 0.0, FIRST_SEQ
    for cell in of_source:
        parts = read_records(conn, *of_run, [source], cell.step0)
        parts = parts.take(np.lexsort((parts.site, parts.step)))
        steps, batch_ids = _steps(conn, of_run, source, cell.step0)
        logs = _logs(conn, of_run, source, cell.step0)
        for start in range(0, len(steps), STEPS_A_PIECE):
            of_piece = steps[start : start + STEPS_A_PIECE]
            seq += 1
            batch = _batch(of_run[0], session, source[1], seq, of_piece, parts)
            numbers = of_piece["step"].tolist()
            batch.header.batch_ids.extend(batch_ids.get(step) for step in numbers)
            for name, values in logs.items():
                if any(step in values for step in numbers):
                    batch.header.logs[name] = [values.get(step) for step in numbers]
            known = of_piece["time"][np.isfinite(of_piece["time"])]
            at = max(at, float(known[-1]) if len(known) else at)
            yield PastBatch(at, source[0], source[1], batch, None)


def _where(table: sa.Table, of_run: tuple[str, str], source: Source, step0: int) -> list[Any]:
    c = table.c
    where = [c.run_id == of_run[0], c.tenant == of_run[1], c.attempt == source[0], c.rank == source[1]]
    return [*where, c.step >= step0, c.step < step0 + t.BLOCK_STEPS]


def _steps(
    conn: Connection, of_run: tuple[str, str], source: Source, step0: int
) -> tuple[npt.NDArray[np.void], dict[int, str]]:
    """Rows of STEP, and their batch ids."""
    query = sa.select(t.scalar).where(*_where(t.scalar, of_run, source, step0)).order_by(t.scalar.c.step)
    rows = conn.execute(query).all()
    out = np.zeros(len(rows), dtype=STEP)
    for i, row in enumerate(rows):
        out["step"][i], out["status"][i] = row.step, row.status
        out["time"][i] = np.nan if row.time is None else row.time
        for name, bit in STEP_SCALARS.items():
            kind = getattr(row, f"{name}_class")
            if kind is not None:
                out["present"][i] |= bit
                out[name][i] = getattr(row, name) if kind == 0 else _OF_CLASS[kind]
    return out, {row.step: row.batch_id for row in rows if row.batch_id is not None}


def _logs(conn: Connection, of_run: tuple[str, str], source: Source, step0: int) -> dict[str, dict[int, float]]:
    """By name and step."""
    c = t.logged.c
    query = sa.select(c.name, c.step, c.value, c.value_class).where(*_where(t.logged, of_run, source, step0))
    out: dict[str, dict[int, float]] = defaultdict(dict)
    for name, step, value, kind in conn.execute(query):
        if kind is not None:
            out[name][step] = value if kind == 0 else _OF_CLASS[kind]
    return out


def _batch(run_id: str, session: str, rank: int, seq: int, steps: npt.NDArray[np.void], parts: Parts) -> Batch:
    """Some steps of a source as its agent could have sent them; histograms stay codes."""
    first, last = np.searchsorted(parts.step, [steps["step"][0], int(steps["step"][-1]) + 1])
    sent = {}
    for name in parts.columns:
        values, field = parts.columns[name][first:last], FIELD_BY_NAME[name]
        if name in HISTOGRAMS:
            if values.any():
                sent[name] = values
        elif not (values == field.default).all():
            sent[name] = values.astype(field.dtype, copy=False)
    header = Header(
        run=run_id,
        session=session,
        rank=rank,
        seq=seq,
        step0=int(steps["step"][0]),
        num_steps=len(steps),
        num_records=int(last - first),
        health={},
        logs={},
        batch_ids=[],
    )
    return Batch(header, steps, parts.step[first:last], parts.site[first:last], sent)
