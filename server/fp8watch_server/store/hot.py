"""Reading records back out of the bodies that were stored as they came.

Upstream:   fp8watch_server.store.write    Downstream: fp8watch_server.store.series
Shapes:     hot_batch rows -> columns [N], one item per (site, step), merged over ranks
Thread:     query pool, detect worker

A step that was computed again after a restart belongs to the newer attempt, rank by rank; a record that one
session sent twice, to the later batch. Decoded batches are kept in a cache of bounded size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS
from fp8watch_agent.wire import Batch, decode_batch, decode_histogram

from . import schema as t

MAX_STEP = (1 << 63) - 1
CACHE_BYTES = 64 << 20

Array = npt.NDArray[Any]
_Key = tuple[str, str, str, str, int, int, float]


def step_range(from_step: int | None, to_step: int | None) -> tuple[int, int]:
    """Both ends of a range of steps; None is open."""
    return 0 if from_step is None else from_step, MAX_STEP if to_step is None else to_step


@dataclass(frozen=True)
class StoredBatch:
    """A decoded batch and what the store knows of it."""

    attempt: int
    arrival: int
    batch: Batch


@dataclass(frozen=True)
class Records:
    """Records sorted by site, then step; one of each. Columns are [N] or [N, size]; histograms are counts."""

    site: npt.NDArray[np.uint64]
    step: npt.NDArray[np.int64]
    columns: dict[str, Array]

    def __len__(self) -> int:
        return len(self.step)


class _Cache:
    """Decoded batches, the least recently used leave first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[Batch, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: _Key) -> Batch | None:
        with self._lock:
            got = self._kept.get(key)
            if got is None:
                return None
            self._kept.move_to_end(key)
            return got[0]

    def put(self, key: _Key, batch: Batch) -> None:
        size = 1024 + batch.steps.nbytes + batch.step.nbytes + batch.site.nbytes
        size += sum(column.nbytes for column in batch.sent.values())
        with self._lock:
            if key in self._kept or size > self._max_bytes:
                return
            self._kept[key] = (batch, size)
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]


_CACHE = _Cache(CACHE_BYTES)


def _key(conn: Connection, tenant: str, run: str, session: str, rank: int, seq: int, received_at: float) -> _Key:
    return (str(conn.engine.url), tenant, run, session, rank, seq, received_at)


def remember(conn: Connection, batch: Batch, received_at: float, *, tenant: str = t.DEFAULT_TENANT) -> None:
    """Keep a batch that was decoded anyway; called when it is about to be committed."""
    h = batch.header
    _CACHE.put(_key(conn, tenant, h.run, h.session, h.rank, h.seq, received_at), batch)


def load(conn: Connection, row: Any) -> Batch | None:
    """The batch of a hot_batch row (run_id, tenant, session, rank, seq, received_at); None when it has gone."""
    key = _key(conn, row.tenant, row.run_id, row.session, row.rank, row.seq, row.received_at)
    batch = _CACHE.get(key)
    if batch is not None:
        return batch
    b = t.hot_batch.c
    body = conn.execute(
        sa.select(b.body).where(
            b.run_id == row.run_id,
            b.tenant == row.tenant,
            b.session == row.session,
            b.rank == row.rank,
            b.seq == row.seq,
        )
    ).scalar()
    if body is None:
        return None
    batch = decode_batch(bytes(body))
    _CACHE.put(key, batch)
    return batch


def batches(
    conn: Connection,
    run_id: str,
    from_step: int = 0,
    to_step: int = MAX_STEP,
    *,
    rank: int | None = None,
    tenant: str = t.DEFAULT_TENANT,
) -> Iterator[StoredBatch]:
    """Batches of a run that hold a step of [from_step, to_step], in the order in which they came."""
    b = t.hot_batch.c
    where = [b.run_id == run_id, b.tenant == tenant, b.step_max >= from_step, b.step_min <= to_step]
    if rank is not None:
        where.append(b.rank == rank)
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.attempt, b.arrival, b.received_at)
        .where(*where)
        .order_by(b.arrival)
    ).all()
    for row in rows:
        batch = load(conn, row)
        if batch is not None:  # retention may be quicker
            yield StoredBatch(row.attempt, row.arrival, batch)


def _take(batch: Batch, name: str, index: Array) -> Array:
    sent = batch.sent.get(name)
    if sent is None:
        f = FIELD_BY_NAME[name]
        if name in HISTOGRAMS:
            return np.zeros((len(index), f.size))
        return np.full(len(index) if f.size == 1 else (len(index), f.size), f.default, dtype=f.dtype)
    return decode_histogram(sent[index]) if name in HISTOGRAMS else sent[index]


def gather(
    conn: Connection,
    run_id: str,
    names: Iterable[str],
    *,
    sites: Sequence[int] | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    rank: int | None = None,
    tenant: str = t.DEFAULT_TENANT,
) -> Records:
    """Columns of a run, of one rank, or merged over all ranks as each field merges (record.FIELDS)."""
    from_step, to_step = step_range(from_step, to_step)
    wanted = sorted({*names, "measured"})
    parts: list[tuple[Array, ...]] = []
    columns: dict[str, list[Array]] = {name: [] for name in wanted}
    newest: dict[tuple[int, int], int] = {}  # (rank, step) -> attempt
    attempts: set[int] = set()
    for stored in batches(conn, run_id, from_step, to_step, rank=rank, tenant=tenant):
        batch, h = stored.batch, stored.batch.header
        attempts.add(stored.attempt)
        for step in batch.steps["step"].tolist():
            if newest.get((h.rank, step), -1) < stored.attempt:
                newest[h.rank, step] = stored.attempt
        mask = (batch.step >= from_step) & (batch.step <= to_step)
        if sites is not None:
            mask &= np.isin(batch.site, np.asarray(sites, dtype=np.uint64))
        index = np.flatnonzero(mask)
        if not len(index):
            continue
        n = len(index)
        parts.append(
            (
                batch.site[index],
                batch.step[index],
                np.full(n, h.rank, dtype=np.int64),
                np.full(n, stored.attempt, dtype=np.int64),
                np.full(n, h.seq, dtype=np.int64),
            )
        )
        for name in wanted:
            columns[name].append(_take(batch, name, index))
    if not parts:
        empty = {name: _empty(name) for name in wanted}
        return Records(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64), empty)
    site, step, ranks, attempt, seq = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((seq, attempt, ranks, step, site))
    last = np.ones(len(order), dtype=bool)  # of equal (site, step, rank) the last in (attempt, seq)
    s, p, r = site[order], step[order], ranks[order]
    last[:-1] = (s[1:] != s[:-1]) | (p[1:] != p[:-1]) | (r[1:] != r[:-1])
    if len(attempts) > 1:
        owner = np.array([newest[key] for key in zip(r.tolist(), p.tolist(), strict=True)], dtype=np.int64)
        last &= attempt[order] == owner
    keep = order[last]
    whole = {name: np.concatenate(values)[keep] for name, values in columns.items()}
    return _merge_ranks(site[keep], step[keep], whole)


def _empty(name: str) -> Array:
    f = FIELD_BY_NAME[name]
    return np.zeros(0 if f.size == 1 else (0, f.size), dtype=np.float64 if name in HISTOGRAMS else f.dtype)


def _merge_ranks(site: Array, step: Array, columns: dict[str, Array]) -> Records:
    if not len(site):
        return Records(site, step, columns)
    first = np.ones(len(site), dtype=bool)
    first[1:] = (site[1:] != site[:-1]) | (step[1:] != step[:-1])
    if first.all():
        return Records(site, step, columns)
    starts = np.flatnonzero(first)
    merged: dict[str, Array] = {}
    for name, values in columns.items():
        merge = FIELD_BY_NAME[name].merge
        if merge == "sum":
            merged[name] = np.add.reduceat(values, starts, axis=0)
        elif merge == "max":
            merged[name] = np.maximum.reduceat(values, starts)  # NaN wins, on purpose
        elif merge == "min":
            merged[name] = np.minimum.reduceat(values, starts)
        elif merge == "or":
            merged[name] = np.bitwise_or.reduceat(values, starts)
        else:  # coordinates and hashes belong to one rank: the lowest one's
            merged[name] = values[starts]
    return Records(site[starts], step[starts], merged)
