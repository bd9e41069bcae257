"""Blocks: up to 256 steps of one site, as native arrays for SQL; and the packed bytes of collectors before the sheets.

Shapes:     Parts of one source, sorted by site and step -> a row of `block` per site; packed rows -> Parts
Thread:     compactor (write), query pool (read)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, holds
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import pg_arrays
from fp8watch_server.store.block_codec import Column, DamagedBlock, Packed
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate
from fp8watch_server.store.records import RANK_OF, Parts, complete, counted, default_of, dtype_of, filled, size_of

Array = npt.NDArray[Any]

OWN_CODES = {"first": 0, "gap": 1, "worst_rank": 33, "noise_rank": 34, "seq0": 35, "seq": 36}
"""Columns of a block that are no fields of the sketch."""
CODES: dict[str, int] = {**OWN_CODES, **{f.name: f.code for f in FIELDS if f.name not in HISTOGRAMS}}
"""Numbers of the columns in a block, for good. They are also the order of the directory: what charts ask for has the
lowest, because a reader goes only as far as it must."""
HISTOGRAM_CODES = {name: FIELD_BY_NAME[name].code for name in HISTOGRAMS}
_KEYS = {"first": "<i8", "gap": "<i8", "seq0": "<i8", "seq": "<i8"}
"""How steps and batches are told: the first, and what each adds to the one before it."""

TABLE: dict[str, Column] = {
    name: Column(code, "<i8") if name in _KEYS else Column(code, dtype_of(name), size_of(name), default_of(name))
    for name, code in CODES.items()
}
HISTOGRAM_TABLE: dict[str, Column] = {
    name: Column(code, dtype_of(name), size_of(name), 0) for name, code in HISTOGRAM_CODES.items()
}
ALL_FIELDS: tuple[str, ...] = tuple(f.name for f in FIELDS)
ROLLED_FIELDS: tuple[str, ...] = (*ALL_FIELDS, *RANK_OF)
_ARRAY_FIELDS = (*t.BLOCK_ARRAYS, *t.BLOCK_COUNTS, *t.BLOCK_SAMPLED)


def cell_of(step: int) -> int:
    """First step of the cell that a step lies in."""
    return step - step % t.BLOCK_STEPS


def arrays_of(parts: Parts, step0: int) -> list[dict[str, Any]]:
    """Rows of `block` without their run, attempt and rank: the native arrays that SQL reads, and no packed bytes.

    Args:
        parts: records of one source within one cell, sorted by site, then step; one of each.
        step0: first step of the cell.
    """
    if not len(parts):
        return []
    edges = np.flatnonzero(parts.site[1:] != parts.site[:-1]) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(parts)]])
    of_all = {"step0": step0, "body": b"", "front_bytes": 0}
    return [
        {"site": site, "num_records": n, **of_all, **row}
        for site, n, row in zip(
            parts.site[starts].tolist(), (ends - starts).tolist(), _native(parts, starts, ends), strict=True
        )
    ]


def _native(parts: Parts, starts: Array, ends: Array) -> list[dict[str, Any]]:
    """What SQL reads. Even steps are a first one and a gap, and counts that are all 0 are left out."""
    needs = {need for name in _ARRAY_FIELDS for need in SERIES_FIELDS[name].needs}
    columns = counted(complete(parts, needs)).columns
    gaps = np.diff(parts.step, append=0)
    out: list[dict[str, Any]] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        of_site = gaps[start : end - 1]
        even = not len(of_site) or bool((of_site == of_site[0]).all())
        first = {"first_step": int(parts.step[start]), "step_gap": int(of_site[0]) if len(of_site) else 1}
        out.append({**first, "steps": None if even else (parts.step[start:end], None)})
    for name in _ARRAY_FIELDS:
        values, present = evaluate(SERIES_FIELDS[name], columns)
        counts = name in t.BLOCK_COUNTS
        if counts or name in t.BLOCK_SAMPLED:
            nothing = present & (values == 0) if counts else ~present
            empty = np.logical_and.reduceat(nothing, starts).tolist()
        else:
            empty = [False] * len(out)
        arrays = pg_arrays("BIGINT" if counts else "REAL", values, present, starts, ends)
        for row, array, left_out in zip(out, arrays, empty, strict=True):
            row[name] = None if left_out else array
    return out


def decode(
    rows: Sequence[Any], names: Sequence[str], *, seqs: bool = True, check: bool = False, absent: bool = True
) -> Parts:
    """Rows (attempt, rank, site, step0, num_records, body, front_bytes) -> their records, in the order of the rows.

    Of `body` the first `front_bytes` are enough where no histogram is asked for. Without `seqs` they are 0; without
    `absent` a column that no row has is left out.

    Raises:
        DamagedBlock: bytes that are not what was written.
    """
    lengths = [row.num_records for row in rows]
    total = sum(lengths)
    step, seq = np.empty(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    with_histograms = any(name in HISTOGRAMS for name in names)
    columns = {name: filled(name, total) for name in names if absent or name == "measured"}
    end = 0
    for row in rows:
        start, end = end, end + row.num_records
        block = _Opened(row, with_histograms, check)
        step[start:end] = _sums(block.front, "first", "gap")
        step[start:end] += row.step0
        if seqs:
            seq[start:end] = _sums(block.front, "seq0", "seq")
        for name in names:
            part = block.of(name)
            if name not in part:
                continue
            if name not in columns:
                columns[name] = filled(name, total)
            part.fill(name, columns[name][start:end])
    site = np.repeat(np.array([row.site for row in rows], dtype=np.uint64), lengths)
    rank = np.repeat(np.array([row.rank for row in rows], dtype=np.int64), lengths)
    attempt = np.repeat(np.array([row.attempt for row in rows], dtype=np.int64), lengths)
    return Parts(site, step, rank, attempt, seq, columns)


class _Opened:
    """The two parts of a block's body."""

    def __init__(self, row: Any, with_histograms: bool, check: bool) -> None:
        whole = bytes(row.body)
        self.front = Packed(whole[: row.front_bytes], TABLE, check=check)
        if self.front.n != row.num_records:
            raise DamagedBlock(f"a block of {self.front.n} records where {row.num_records} were written")
        self._histograms = Packed(whole[row.front_bytes :], HISTOGRAM_TABLE, check=check) if with_histograms else None

    def of(self, name: str) -> Packed:
        """The part that has a column."""
        return self._histograms if name in HISTOGRAMS and self._histograms is not None else self.front


def _sums(body: Packed, first: str, gap: str) -> npt.NDArray[np.int64]:
    """The way back from gaps."""
    even, start = body.one(gap), body.one(first) or 0
    if even is not None:
        return np.asarray(np.arange(body.n) * int(even) + int(start), dtype=np.int64)
    gaps = body.column(gap)
    gaps[0] = start
    return np.asarray(np.cumsum(gaps), dtype=np.int64)


def with_ranks(parts: Parts) -> Parts:
    """The same with the columns of a roll-up: the rank of each maximum, here the record's own."""
    ranks = parts.rank.astype(np.int32)
    own = {name: np.where(_has(parts, of), ranks, -1).astype(np.int32) for name, of in RANK_OF.items()}
    if (merged := ranks < 0).any():  # of a roll-up already
        own = {name: np.where(merged, parts.columns.get(name, -1), mine).astype(np.int32) for name, mine in own.items()}
    return Parts(parts.site, parts.step, parts.rank, parts.attempt, parts.seq, {**parts.columns, **own})


def _has(parts: Parts, name: str) -> npt.NDArray[np.bool_]:
    return holds(parts.columns["measured"], FIELD_BY_NAME[name].group)
