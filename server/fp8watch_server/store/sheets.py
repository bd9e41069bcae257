"""Sheets: up to 256 steps of 32 sites of one source, in columns.

Upstream:   fp8watch_server.store.compact
Downstream: fp8watch_server.store.reading
Shapes:     Parts of one source, sorted by site and step -> a row of `sheet` for 32 sites; and back
Thread:     compactor (write), query pool (read)

What was put in comes out to the last bit; three numbers of light records in order have been rounded before
(store.light_rounding). Sheets of collectors that did not round are read as they are.

Collectors before this one stored a block for each site (store.blocks). Those stay readable, and become sheets when records
join them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.record import HISTOGRAMS
from fp8watch_server.store.block_codec import DamagedBlock
from fp8watch_server.store.blocks import HISTOGRAM_CODES, TABLE
from fp8watch_server.store.records import Parts, filled, join, size_of
from fp8watch_server.store.sheet_codec import Places, Unpacked, compress, decompress, narrow, pack, seal, unseal, wide
from fp8watch_server.store.sheet_histograms import pack_histogram, payload_bytes, unpack_histogram

Array = npt.NDArray[Any]

SITES_A_SHEET = 32
"""A chart of one site reads a sheet a cell, so it must not be large; a frame of few records has a poor table of codes."""

_NO_SEQ, _SEQ_OF_STEP, _SEQ_OF_RECORD = 0, 1, 2


def encode(parts: Parts, step0: int) -> list[dict[str, Any]]:
    """Rows of `sheet` without their run, attempt and rank.

    Args:
        parts: records of one source within one cell, sorted by site, then step; one of each. A column that they lack is
            at its default.
        step0: first step of the cell.
    """
    if not len(parts):
        return []
    starts = np.concatenate([[0], np.flatnonzero(parts.site[1:] != parts.site[:-1]) + 1])
    places = Places(np.diff(np.concatenate([starts, [len(parts)]])))
    edges = [(a, min(a + SITES_A_SHEET, len(starts))) for a in range(0, len(starts), SITES_A_SHEET)]
    fronts = pack({n: v for n, v in parts.columns.items() if n not in HISTOGRAMS}, TABLE, places, edges)
    histograms = [
        pack_histogram(HISTOGRAM_CODES[name], parts.columns[name], places, edges)
        for name in HISTOGRAMS
        if name in parts.columns
    ]
    sites = parts.site[starts]
    offset = (parts.step - step0).astype(np.uint8)
    rows: list[dict[str, Any]] = []
    for i, (a, b) in enumerate(edges):
        first, last = int(places.starts[a]), int(places.ends[b - 1])
        of_sheet = Places(places.lengths[a:b])
        keys = [sites[a:b].astype("<u8").tobytes(), of_sheet.lengths.astype("<u2").tobytes()]
        keys += _keys(offset[first:last], parts.seq[first:last], of_sheet)
        entries, payload = fronts[i]
        of_buckets = [of_histogram[i] for of_histogram in histograms if of_histogram[i][0]]
        rows.append(
            {
                "site_min": int(sites[a]),
                "site_max": int(sites[b - 1]),
                "step0": step0,
                "num_records": last - first,
                "max_records": int(of_sheet.lengths.max()),
                "body": seal([*keys, entries], payload),
                "histograms": seal([e for e, _ in of_buckets], [f for _, frames in of_buckets for f in frames]),
            }
        )
    return rows


def _keys(offset: npt.NDArray[np.uint8], seq: npt.NDArray[np.int64], places: Places) -> list[Any]:
    """Offsets of the steps, once where all sites have the same ones; and which batch they came in."""
    grid = offset.reshape(-1, places.each or len(offset))
    same = places.each > 0 and bool((grid == grid[0]).all())
    keys: list[Any] = [grid[0].tobytes() if same else compress(offset.tobytes()), same]
    if not seq.any():
        return [*keys, [_NO_SEQ]]
    of_step = np.zeros(256, dtype=np.int64)
    of_step[offset] = seq
    if bool((of_step[offset] == seq).all()):
        steps = np.flatnonzero(np.bincount(offset, minlength=256)).astype(np.uint8)
        return [*keys, [_SEQ_OF_STEP, steps.tobytes(), *narrow(of_step[steps].view(np.uint64))]]
    low, width, raw = narrow(seq.view(np.uint64))
    return [*keys, [_SEQ_OF_RECORD, low, width, compress(raw)]]


def decode(
    rows: Sequence[Any],
    names: Sequence[str],
    *,
    sites: Sequence[int] | None = None,
    seqs: bool = True,
    check: bool = False,
    absent: bool = True,
) -> Parts:
    """Rows (attempt, rank, step0, num_records, body, histograms) -> their records, of some sites or of all, in the order
    of the rows; within a row by site and step.

    `histograms` may be missing where none is asked for. Without `seqs` they are 0; without `absent` a column that no row
    has is left out.

    Raises:
        DamagedBlock: bytes that are not what was written.
    """
    parts = [p for row in rows for p in _opened(row, names, sites, seqs, check)]
    there = [name for name in names if any(name in p.columns for p in parts)]
    wanted = list(names) if absent else list(dict.fromkeys(["measured", *there]))
    for p in parts:
        for name in wanted:
            if name not in p.columns:
                p.columns[name] = filled(name, len(p))
    return join(parts, wanted)


def _opened(row: Any, names: Sequence[str], sites: Sequence[int] | None, seqs: bool, check: bool) -> list[Parts]:
    try:
        return _open(row, names, sites, seqs, check)
    except (ValueError, TypeError, IndexError, KeyError, zstandard.ZstdError) as e:
        if isinstance(e, DamagedBlock):
            raise
        raise DamagedBlock(f"a sheet cannot be read ({type(e).__name__}: {e})") from e


def _open(row: Any, names: Sequence[str], sites: Sequence[int] | None, seqs: bool, check: bool) -> list[Parts]:
    body = bytes(row.body)
    (raw_sites, raw_lengths, raw_offsets, same, raw_seqs, entries), at = unseal(body, check)
    ids = np.frombuffer(raw_sites, "<u8")
    places = Places(np.frombuffer(raw_lengths, "<u2").astype(np.int64))
    if places.n != row.num_records or len(ids) != len(places.lengths):
        raise DamagedBlock(f"a sheet of {places.n} records where {row.num_records} were written")
    wanted = None if sites is None else np.flatnonzero(np.isin(ids, np.asarray(sites, dtype=np.uint64)))
    part = slice(0, places.n)
    if wanted is not None:
        if not len(wanted):
            return []
        part = slice(int(places.starts[wanted[0]]), int(places.ends[wanted[-1]]))
    offset = np.frombuffer(raw_offsets if same else decompress(raw_offsets), np.uint8)
    offset = (np.tile(offset, len(ids)) if same else offset)[part]
    columns: dict[str, Array] = {}
    front = Unpacked(body, entries, at, places, TABLE)
    for name in names:
        if name not in HISTOGRAMS and name in front:
            columns[name] = front.column(name, part)
    asked = [name for name in names if name in HISTOGRAMS]
    if asked or check:
        body = bytes(row.histograms)
        lanes, at = unseal(body, check)
        for entry in lanes:
            for name in asked:
                if entry[0] == HISTOGRAM_CODES[name]:
                    columns[name] = unpack_histogram(body, entry, at, size_of(name), places, part)
            at += payload_bytes(entry)
    n = part.stop - part.start
    rank, attempt = (np.full(n, key, dtype=np.int64) for key in (row.rank, row.attempt))
    seq = _seqs(raw_seqs, offset, part) if seqs else np.zeros(n, dtype=np.int64)
    step = offset.astype(np.int64) + row.step0
    out = Parts(np.repeat(ids, places.lengths)[part], step, rank, attempt, seq, columns)
    if wanted is not None and len(wanted) != wanted[-1] - wanted[0] + 1:
        out = out.take(np.flatnonzero(np.isin(out.site, ids[wanted])))
    return [out]


def _seqs(packed: Sequence[Any], offset: npt.NDArray[np.uint8], part: slice) -> npt.NDArray[np.int64]:
    kind, *rest = packed
    if kind == _NO_SEQ:
        return np.zeros(len(offset), dtype=np.int64)
    if kind == _SEQ_OF_RECORD:
        low, width, raw = rest
        return wide((low, width, decompress(raw)), np.uint64).view(np.int64)[part]
    of_step = np.zeros(256, dtype=np.int64)
    of_step[np.frombuffer(rest[0], np.uint8)] = wide(rest[1:], np.uint64).view(np.int64)
    return of_step[offset]
