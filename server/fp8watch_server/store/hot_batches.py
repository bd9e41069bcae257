"""Hot batches: bodies stored as received, and a bounded cache of their decoded form.

Upstream:   fp8watch_server.store.commit (table hot_batch)
Downstream: fp8watch_server.pipeline.detect_worker
Shapes:     hot_batch rows -> wire.Batch -> records.Parts
Thread:     query pool, detect worker, compactor

Of a batch that is compacted in part, the steps before hot_batch.step_min are in blocks already and are skipped.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.wire import Batch, WireError, decode_batch, parent_seq
from fp8watch_server.db import schema as t
from fp8watch_server.store.light_rounding import round_light
from fp8watch_server.store.records import Parts, filled, kept

log = logging.getLogger("fp8watch.store")

MAX_STEP = (1 << 63) - 1
CACHE_BYTES = 96 << 20
BODIES_AT_ONCE = 64

Array = npt.NDArray[Any]
_Key = tuple[str, str, str, str, int, int, float]


def step_range(from_step: int | None, to_step: int | None) -> tuple[int, int]:
    """Both ends of a range of steps; None is open."""
    return 0 if from_step is None else from_step, MAX_STEP if to_step is None else to_step


class _Cache:
    """LRU cache of decoded batches."""

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
        size = 1024 + batch.nbytes
        with self._lock:
            if key in self._kept or size > self._max_bytes:
                return
            self._kept[key] = (batch, size)
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]


_CACHE = _Cache(CACHE_BYTES)


_DATABASES: weakref.WeakKeyDictionary[sa.Dialect, str] = weakref.WeakKeyDictionary()


def _key(conn: Connection, tenant: str, run: str, session: str, rank: int, seq: int, received_at: float) -> _Key:
    database = _DATABASES.get(conn.dialect)
    if database is None:
        database = _DATABASES[conn.dialect] = str(conn.engine.url)
    return (database, tenant, run, session, rank, seq, received_at)


def remember(conn: Connection, batch: Batch, received_at: float, *, tenant: str = t.DEFAULT_TENANT) -> None:
    """Cache a batch that is decoded anyway; called just before its commit."""
    h = batch.header
    _CACHE.put(_key(conn, tenant, h.run, h.session, h.rank, h.seq, received_at), batch)


_ROW_KEY = ("run_id", "tenant", "session", "rank", "seq")


def load(conn: Connection, row: Any) -> Batch | None:
    """Decode the batch of a hot_batch row (run_id, tenant, session, rank, seq, received_at); None when it is deleted.

    Raises:
        WireError: the stored body cannot be read.
    """
    key = _row_key(conn, row)
    batch = _CACHE.get(key)
    if batch is not None:
        return batch
    b = t.hot_batch.c
    body = conn.execute(sa.select(b.body).where(*(b[name] == getattr(row, name) for name in _ROW_KEY))).scalar()
    return None if body is None else _decoded(key, body)


def _decoded(key: _Key, body: bytes) -> Batch:
    batch = decode_batch(bytes(body))
    _CACHE.put(key, batch)
    return batch


def load_each(conn: Connection, rows: Sequence[Any]) -> Iterator[Batch | WireError | None]:
    """Decode the batches of rows of one run that are taken in turn, fetching many bodies at a time; None: it is deleted.

    One that cannot be read gives its error.
    """
    b = t.hot_batch.c
    bodies: dict[int, bytes] = {}
    for i, row in enumerate(rows):
        if i % BODIES_AT_ONCE == 0:
            ahead = rows[i : i + BODIES_AT_ONCE]
            missing = [r.arrival for r in ahead if _CACHE.get(_row_key(conn, r)) is None]
            these = (b.run_id == row.run_id, b.tenant == row.tenant, b.arrival.in_(missing))
            found = conn.execute(sa.select(b.arrival, b.body).where(*these)).all() if missing else []
            bodies = {got.arrival: bytes(got.body) for got in found}
        key = _row_key(conn, row)
        batch = _CACHE.get(key)
        try:
            if batch is None and row.arrival in bodies:
                batch = _decoded(key, bodies.pop(row.arrival))
        except WireError as e:
            yield e
            continue
        yield load(conn, row) if batch is None else batch  # it may have left the cache since


def _row_key(conn: Connection, row: Any) -> _Key:
    return _key(conn, row.tenant, row.run_id, row.session, row.rank, row.seq, row.received_at)


def load_all(conn: Connection, rows: Sequence[Any]) -> list[tuple[Any, Batch]]:
    """Decode the batches of rows of one run, fetching many bodies at a time. Unreadable ones are left out."""
    found: dict[int, Batch] = {}
    missing: list[int] = []
    for i, row in enumerate(rows):
        batch = _CACHE.get(_row_key(conn, row))
        if batch is None:
            missing.append(i)
        else:
            found[i] = batch
    b = t.hot_batch.c
    for start in range(0, len(missing), BODIES_AT_ONCE):
        part = {rows[i].arrival: i for i in missing[start : start + BODIES_AT_ONCE]}
        first = rows[missing[start]]
        bodies = conn.execute(
            sa.select(b.arrival, b.body).where(
                b.run_id == first.run_id, b.tenant == first.tenant, b.arrival.in_(list(part))
            )
        )
        for arrival, body in bodies:
            i = part[arrival]
            row = rows[i]
            try:
                batch = found[i] = decode_batch(bytes(body))
            except WireError as e:
                log.error("batch %s of run %r cannot be read (%s); it is left out", row.seq, row.run_id, e)
                continue
            _CACHE.put(_key(conn, row.tenant, row.run_id, row.session, row.rank, row.seq, row.received_at), batch)
    return [(rows[i], found[i]) for i in sorted(found)]


def rows_between(
    conn: Connection,
    run_id: str,
    from_step: int,
    to_step: int,
    *,
    rank: int | None = None,
    tenant: str = t.DEFAULT_TENANT,
) -> list[Any]:
    """Hot batches with a step in [from_step, to_step], in order of arrival, without bodies."""
    b = t.hot_batch.c
    where = [b.run_id == run_id, b.tenant == tenant, b.step_max >= from_step, b.step_min <= to_step]
    if rank is not None:
        where.append(b.rank == rank)
    names = (*_ROW_KEY, "attempt", "arrival", "received_at", "step_min", "step_max")
    return list(conn.execute(sa.select(*(b[n] for n in names)).where(*where).order_by(b.arrival)))


def parts_of(
    row: Any,
    batch: Batch,
    names: Sequence[str],
    from_step: int,
    to_step: int,
    sites: npt.NDArray[np.uint64] | None = None,
    *,
    rounded: bool = True,
) -> Parts | None:
    """Records of a batch between two steps; None when there are none.

    Whoever takes those of many batches rounds them together (light_rounding), and asks for them not `rounded`.
    """
    from_step = max(from_step, row.step_min)
    index: Any
    if sites is None and from_step <= row.step_min and to_step >= row.step_max and _whole(batch, row):
        index = slice(None)
        n = len(batch.step)
    else:
        mask = (batch.step >= from_step) & (batch.step <= to_step)
        if sites is not None:
            mask &= batch.site == sites[0] if len(sites) == 1 else np.isin(batch.site, sites)
        index = np.flatnonzero(mask)
        n = len(index)
    if not n:
        return None
    columns = {}
    for name in names:
        sent = batch.sent.get(name)
        columns[name] = filled(name, n) if sent is None else kept(name, sent[index])
    if rounded:
        round_light(columns, batch.sent, index)
    rank, attempt, seq = (np.full(n, key, dtype=np.int64) for key in (row.rank, row.attempt, parent_seq(row.seq)))
    return Parts(batch.site[index], batch.step[index], rank, attempt, seq, columns)


def _whole(batch: Batch, row: Any) -> bool:
    return bool(len(batch.steps)) and int(batch.steps["step"][0]) == row.step_min
