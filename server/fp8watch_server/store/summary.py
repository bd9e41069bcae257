"""Cell summaries: worst values of each site in bins of 32 steps, and the sums of all 256.

Shapes:     Parts sorted by site and step -> [S] of SUMMARY -> bytes; and back
Thread:     compactor (write), query pool (read)

A heat map or a top-N over millions of records reads these and no block: one row for all sites of 256 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.record import holds
from fp8watch_server.db import schema as t
from fp8watch_server.store.block_codec import DamagedBlock
from fp8watch_server.store.fields import SERIES_FIELDS, badness, evaluate
from fp8watch_server.store.records import Parts, complete, counted

Array = npt.NDArray[Any]

BIN_STEPS = 32
NUM_BINS = t.BLOCK_STEPS // BIN_STEPS
FLOATS = ("amax_max", "scale_inv_max", "scale_inv_min", "clip_depth", "tile_sqnr_db", "sqnr_db", "underflow_ratio")
COUNTS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles", "num_off_scale_tiles")
WORST = (*FLOATS, *COUNTS)
"""Fields whose worst value is kept; the order is that of the bits of `present`: only ever appended to."""
SUMS = ("num_elements", "num_nonzero", "num_underflow", *COUNTS)
NEEDS = tuple(dict.fromkeys(["measured", *(c for f in (*WORST, *SUMS) for c in SERIES_FIELDS[f].needs), "amax_hist"]))

SUMMARY = np.dtype(
    [
        ("site", "<u8"),
        ("records", "<u2", (NUM_BINS,)),
        ("first", "u1", (NUM_BINS,)),  # offset of the bin's first step within the cell
        ("present", "<u2", (NUM_BINS,)),  # bit i: the bin has a value of WORST[i]
        *[(name, "<f4", (NUM_BINS,)) for name in FLOATS],
        *[(name, "<i8", (NUM_BINS,)) for name in COUNTS],
        *[(f"{name}_at", "u1", (NUM_BINS,)) for name in WORST],  # offset of the worst value's step within the cell
        *[(f"sum_{name}", "<i8") for name in SUMS],
        ("amax_hist", "<i8", (64,)),
    ]
)
_FORMAT = b"S1"
_MAX_BYTES = 1 << 30


def summarize(parts: Parts, step0: int) -> npt.NDArray[np.void]:
    """[S] of SUMMARY, by site; records of one cell, merged over ranks, sorted by site and step."""
    if not len(parts):
        return np.zeros(0, dtype=SUMMARY)
    columns = counted(complete(parts, NEEDS)).columns
    new_site = np.concatenate([[True], parts.site[1:] != parts.site[:-1]])
    sites = parts.site[new_site]
    out = np.zeros(len(sites), dtype=SUMMARY)
    out["site"] = sites
    offset = parts.step - step0
    lane = (np.cumsum(new_site) - 1) * NUM_BINS + offset // BIN_STEPS
    starts = np.flatnonzero(np.concatenate([[True], lane[1:] != lane[:-1]]))
    where = lane[starts]
    row, column = where // NUM_BINS, where % NUM_BINS
    out["records"][row, column] = np.diff(np.concatenate([starts, [len(lane)]]))
    out["first"][row, column] = offset[starts]
    for bit, name in enumerate(WORST):
        field = SERIES_FIELDS[name]
        values, present = evaluate(field, columns)
        index = worst_of_each(badness(values, present, field.worst), starts)
        there = np.logical_or.reduceat(present, starts)
        index = index[there]
        out[name][row[there], column[there]] = values[index]
        out[f"{name}_at"][row[there], column[there]] = offset[index]
        out["present"][row[there], column[there]] |= np.uint16(1 << bit)
    of_sites = np.flatnonzero(new_site)
    for name in SUMS:
        values, present = evaluate(SERIES_FIELDS[name], columns)
        out[f"sum_{name}"] = np.add.reduceat(np.where(present, values, 0), of_sites)
    has_hist = holds(columns["measured"], SERIES_FIELDS["amax_max"].groups)
    out["amax_hist"] = np.add.reduceat(np.where(has_hist[:, None], columns["amax_hist"], 0), of_sites, axis=0)
    return out


def worst_of_each(rank_of: npt.NDArray[np.float64], starts: Array) -> Array:
    """Index of the first largest value of each group."""
    top = np.maximum.reduceat(rank_of, starts)
    group = np.zeros(len(rank_of), dtype=np.int64)
    group[starts[1:]] = 1
    group = np.cumsum(group)
    hits = np.flatnonzero(rank_of == top[group])[::-1]
    out = starts.copy()
    out[group[hits]] = hits
    return out


def pack_summary(rows: npt.NDArray[np.void]) -> bytes:
    """Shuffle bytes: byte k of all sites, then byte k+1, because adjacent ones are alike."""
    planes = rows.view(np.uint8).reshape(len(rows), SUMMARY.itemsize).T
    return _FORMAT + zstandard.ZstdCompressor(level=3, write_checksum=True).compress(planes.tobytes())


def unpack_summary(body: bytes) -> npt.NDArray[np.void]:
    """Inverse of `pack_summary`.

    Raises:
        DamagedBlock: bytes that are not what was written.
    """
    if body[:2] != _FORMAT:
        raise DamagedBlock(f"a summary begins with {body[:2]!r}; this collector reads {_FORMAT!r}: upgrade it")
    try:
        raw = zstandard.ZstdDecompressor().decompress(body[2:], max_output_size=_MAX_BYTES)
        planes = np.frombuffer(raw, dtype=np.uint8).reshape(SUMMARY.itemsize, -1)
    except (zstandard.ZstdError, ValueError) as e:
        raise DamagedBlock(f"a summary cannot be read ({e})") from e
    return np.ascontiguousarray(planes.T).view(SUMMARY)[:, 0]
