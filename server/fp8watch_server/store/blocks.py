"""Blocks: up to 256 steps of one site, in columns.

Upstream:   fp8watch_server.store.records, fp8watch_server.store.packing
Downstream: fp8watch_server.store.compact, fp8watch_server.store.reading
Shapes:     Parts of one source, sorted by site and step -> a row of `block` per site; and back
Thread:     compactor (write), query pool (read)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS

from . import schema as t
from .fields import SERIES_FIELDS, evaluate
from .packing import Column, Packed, pack
from .records import RANK_OF, Parts, counted, default_of, dtype_of, filled, join, size_of

Array = npt.NDArray[Any]

# Numbers of the columns in a block, for good: a new field takes a new number. The order is that of the directory, and
# what charts ask for stands first, because a reader goes only as far as it must.
CODES: dict[str, int] = {
    name: code
    for code, name in enumerate(
        (
            *("first", "gap", "seq0", "seq", "measured", "amax_max", "scale_inv_max", "scale_inv_min"),
            *("tile_noise_ratio_sum", "num_tiles", "num_zero_tiles", "num_nonzero", "num_underflow", "num_elements"),
            *("num_saturated", "num_nan", "num_inf", "scale_ratio_max", "signal_energy", "noise_energy"),
            *("tile_noise_ratio_max", "num_sentinel_tiles", "num_off_scale_tiles", "num_eps_tiles", "scale_ratio_min"),
            *("amax_min_nonzero", "moment2", "moment4", "order", "num_calls", "weight_hash", "worst_tile"),
            *("noise_tile", "off_scale_tile", "first_nonfinite", "worst_rank", "noise_rank"),
            *("output_num_nonfinite", "gemm_error", "gemm_gain_max", "gemm_gain_min"),
        )
    )
}
HISTOGRAM_CODES = {"amax_hist": 0, "depth_hist": 1}
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
_ARRAY_FIELDS = (*t.BLOCK_ARRAYS, *t.BLOCK_COUNTS)


def cell_of(step: int) -> int:
    """First step of the cell that a step lies in."""
    return step - step % t.BLOCK_STEPS


def _gaps(values: npt.NDArray[np.int64], first: Array) -> npt.NDArray[np.int64]:
    """[B, n] -> what each adds to the one before it; the first of a block repeats the second, so that even steps pack
    into one number.
    """
    gaps = np.diff(values, axis=1, prepend=first[:, None])
    if values.shape[1] > 1:
        gaps[:, 0] = gaps[:, 1]
    return gaps


def encode(parts: Parts, step0: int, *, arrays: bool) -> list[dict[str, Any]]:
    """Rows of `block` without their run, attempt and rank.

    Args:
        parts: records of one source within one cell, sorted by site, then step; one of each.
        step0: first step of the cell.
        arrays: whether to add the native arrays that SQL reads.
    """
    if not len(parts):
        return []
    edges = np.flatnonzero(parts.site[1:] != parts.site[:-1]) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(parts)]]))
    rows: list[dict[str, Any]] = []
    for n in np.unique(lengths).tolist():
        of_length = starts[lengths == n]
        index = of_length[:, None] + np.arange(n)
        rows += _encode_alike(parts, index, step0, arrays)
    rows.sort(key=lambda row: int(row["site"]))
    return rows


def _encode_alike(parts: Parts, index: Array, step0: int, arrays: bool) -> list[dict[str, Any]]:
    """Blocks of equal length, `index` [B, n]."""
    columns: dict[str, Array] = {}
    for name, values in (("first", parts.step - step0), ("seq0", parts.seq)):
        of_blocks = values[index]
        first = of_blocks[:, 0]
        columns[name] = np.broadcast_to(first[:, None], of_blocks.shape)
        columns["gap" if name == "first" else "seq"] = _gaps(of_blocks, first)
    columns |= {name: parts.columns[name][index] for name in CODES if name in parts.columns}
    bodies = pack({name: columns[name] for name in CODES if name in columns}, TABLE)
    histograms = pack({name: parts.columns[name][index] for name in HISTOGRAMS}, HISTOGRAM_TABLE)
    native = _native(parts, index) if arrays else [{}] * len(bodies)
    sites = parts.site[index[:, 0]].tolist()
    return [
        {"site": site, "step0": step0, "num_records": index.shape[1], "body": body, "histograms": hist, **more}
        for site, body, hist, more in zip(sites, bodies, histograms, native, strict=True)
    ]


def _native(parts: Parts, index: Array) -> list[dict[str, Any]]:
    columns = counted(parts).columns
    steps = parts.step[index]
    out: list[dict[str, Any]] = [{"steps": (row, None)} for row in steps]
    for name in _ARRAY_FIELDS:
        values, present = evaluate(SERIES_FIELDS[name], columns)
        for row, v, p in zip(out, values[index], present[index], strict=True):
            row[name] = (v, p)
    return out


def decode(rows: Iterable[Any], names: Sequence[str], *, check: bool = False) -> Parts:
    """Rows (attempt, rank, site, step0, body, histograms) -> their records, in the order of the rows.

    `histograms` may be None where no histogram is asked for.

    Raises:
        DamagedBlock: bytes that are not what was written.
    """
    return join([_decode_one(row, names, check) for row in rows], names)


def _decode_one(row: Any, names: Sequence[str], check: bool) -> Parts:
    body = Packed(bytes(row.body), TABLE, check=check)
    n = body.n
    columns: dict[str, Array] = {}
    hist: Packed | None = None
    for name in names:
        if name in HISTOGRAMS:
            hist = hist or Packed(bytes(row.histograms), HISTOGRAM_TABLE, check=check)
            columns[name] = hist.column(name)
        else:
            columns[name] = body.column(name)
    return Parts(
        np.full(n, row.site, dtype=np.uint64),
        _sums(body, "first", "gap") + row.step0,
        np.full(n, row.rank, dtype=np.int64),
        np.full(n, row.attempt, dtype=np.int64),
        _sums(body, "seq0", "seq"),
        columns,
    )


def _sums(body: Packed, first: str, gap: str) -> npt.NDArray[np.int64]:
    """The way back from gaps."""
    gaps = body.column(gap).copy()
    gaps[0] = body.column(first)[0]
    return np.asarray(np.cumsum(gaps), dtype=np.int64)


def with_ranks(parts: Parts) -> Parts:
    """The same with the columns of a roll-up: the rank of each maximum, here the record's own."""
    ranks = parts.rank.astype(np.int32)
    own = {name: np.where(_has(parts, of), ranks, -1).astype(np.int32) for name, of in RANK_OF.items()}
    return Parts(parts.site, parts.step, parts.rank, parts.attempt, parts.seq, {**parts.columns, **own})


def _has(parts: Parts, name: str) -> npt.NDArray[np.bool_]:
    group = int(FIELD_BY_NAME[name].group)
    return np.asarray((parts.columns["measured"] & group) == group)


def complete(parts: Parts, names: Iterable[str]) -> Parts:
    """The same with a column of defaults where one is missing."""
    more = {name: filled(name, len(parts)) for name in names if name not in parts.columns}
    return Parts(parts.site, parts.step, parts.rank, parts.attempt, parts.seq, {**parts.columns, **more})
