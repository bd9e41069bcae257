"""Columnar records, and their merge over batches, attempts and ranks.

Shapes:     columns [N], [N, size]; histograms as codes on the way in, as counts where they were asked for
Thread:     any; only pure functions

Reading from hot batches and from blocks must give bit-identical results, so both go through here: sums are kept to 20
bits of fraction (within 5e-7), histograms that were added over ranks are encoded once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import EVERY_CALL, FIELD_BY_NAME, HISTOGRAMS, holds, lacking
from fp8watch_agent.wire import encode_histogram
from fp8watch_server.store.block_codec import short_mantissa

Array = npt.NDArray[Any]

COUNTS_OF_CODES: npt.NDArray[np.int64] = np.rint(np.exp2(np.arange(256) / 8.0) - 1.0).astype(np.int64)
"""Integer count of each histogram code: integers sum exactly in any order."""

WORST_OF = {"worst_tile": "amax_max", "noise_tile": "tile_noise_ratio_max"}
"""Coordinates that follow the rank of another column's maximum."""
OF_SAMPLES: dict[str, tuple[str, ...]] = {
    "tile_noise_ratio_sum": ("num_tiles", "num_zero_tiles"),
    **dict.fromkeys(("signal_energy", "noise_energy", "gain_energy", "moment2", "moment4"), ("num_elements",)),
}
"""Sums that are sampled, and what they are a sum over: the first of these less the others."""
RANK_OF = {"worst_rank": "amax_max", "noise_rank": "tile_noise_ratio_max"}
"""Columns of a roll-up: the rank of that maximum."""


@dataclass(frozen=True)
class Records:
    """Unique records sorted by site, then step. Columns are [N] or [N, size]; histograms are counts."""

    site: npt.NDArray[np.uint64]
    step: npt.NDArray[np.int64]
    columns: dict[str, Array]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Parts:
    """Records of any ranks and attempts, in any order. Histograms are codes."""

    site: npt.NDArray[np.uint64]
    step: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    attempt: npt.NDArray[np.int64]
    seq: npt.NDArray[np.int64]
    columns: dict[str, Array]

    def __len__(self) -> int:
        return len(self.step)

    def take(self, index: Array) -> Parts:
        """A subset by index or mask."""
        columns = {name: values[index] for name, values in self.columns.items()}
        return Parts(
            self.site[index], self.step[index], self.rank[index], self.attempt[index], self.seq[index], columns
        )


def dtype_of(name: str) -> str:
    """Dtype as stored: histograms are codes."""
    if name in RANK_OF:
        return "<i4"
    if name in HISTOGRAMS:
        return "<u1"
    f = FIELD_BY_NAME[name]
    return "<i8" if f.merge == "sum" and f.dtype == "<i4" else f.dtype  # sums over a thousand ranks overflow 32 bits


def default_of(name: str) -> float:
    """Value of an omitted column."""
    return -1 if name in RANK_OF else 0 if name in HISTOGRAMS else FIELD_BY_NAME[name].default


def size_of(name: str) -> int:
    """Numbers per record."""
    return 1 if name in RANK_OF else FIELD_BY_NAME[name].size


def filled(name: str, n: int) -> Array:
    """A column of defaults."""
    size = size_of(name)
    return np.full(n if size == 1 else (n, size), default_of(name), dtype=dtype_of(name))


def kept(name: str, values: Array) -> Array:
    """Values in stored precision: doubles with a short mantissa, counts in 64 bits."""
    if values.dtype == np.float64:
        return short_mantissa(values)
    return values.astype(np.int64) if values.dtype == np.int32 and dtype_of(name) == "<i8" else values


def complete(parts: Parts, names: Iterable[str]) -> Parts:
    """The same with a column of defaults where one is missing."""
    more = {name: filled(name, len(parts)) for name in names if name not in parts.columns}
    return Parts(parts.site, parts.step, parts.rank, parts.attempt, parts.seq, {**parts.columns, **more})


def join(parts: Sequence[Parts], names: Iterable[str]) -> Parts:
    """Concatenate."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Parts(none.astype(np.uint64), none, none, none, none, {name: filled(name, 0) for name in names})
    return Parts(
        np.concatenate([p.site for p in parts]),
        np.concatenate([p.step for p in parts]),
        np.concatenate([p.rank for p in parts]),
        np.concatenate([p.attempt for p in parts]),
        np.concatenate([p.seq for p in parts]),
        {name: np.concatenate([p.columns[name] for p in parts]) for name in names},
    )


def newest_of_each(parts: Parts) -> Parts:
    """Keep the record of the latest batch per (site, step, rank, attempt); sorted by these."""
    order = np.lexsort((parts.seq, parts.attempt, parts.rank, parts.step, parts.site))
    keys = [a[order] for a in (parts.site, parts.step, parts.rank, parts.attempt)]
    last = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        last[:-1] = np.logical_or.reduce([k[1:] != k[:-1] for k in keys])
    return parts.take(order[last])


def owned(parts: Parts, owner: Mapping[tuple[int, int], int] | None) -> Parts:
    """Keep only records of the attempt that owns their (rank, step): {(rank, step): attempt}."""
    if owner is None:
        return parts
    of = np.array(
        [owner.get(key, -1) for key in zip(parts.rank.tolist(), parts.step.tolist(), strict=True)], dtype=np.int64
    )
    return parts.take(np.flatnonzero((of == parts.attempt) | (of < 0)))


def with_denominators(names: Iterable[str]) -> set[str]:
    """Columns that `over_ranks` needs to merge these."""
    asked = set(names)
    return asked.union(*({"measured", *OF_SAMPLES[name]} for name in asked & set(OF_SAMPLES)))


def over_ranks(parts: Parts) -> Parts:
    """Merge the ranks of each (site, step) as each field merges. Sorted by site, step, rank; rank and attempt of the
    result are those of the first. Histograms stay codes.

    Ranks take full statistics in turn. A sampled sum of some ranks stands for all of them, in proportion to the tiles or
    elements that it was taken over: ratios of the result (SQNR, kurtosis) are those of the ranks that measured.
    """
    n = len(parts)
    first = np.ones(n, dtype=bool)
    if n > 1:
        first[1:] = (parts.site[1:] != parts.site[:-1]) | (parts.step[1:] != parts.step[:-1])
    if first.all():
        return parts
    starts = np.flatnonzero(first)
    group = np.cumsum(first) - 1
    merged: dict[str, Array] = {}
    for name, values in parts.columns.items():
        merge = "of" if name in RANK_OF else FIELD_BY_NAME[name].merge
        if name in HISTOGRAMS:
            merged[name] = encode_histogram(np.add.reduceat(COUNTS_OF_CODES[values], starts, axis=0))
        elif merge == "sum":
            with np.errstate(over="ignore", invalid="ignore"):
                total = np.add.reduceat(values, starts, axis=0)
                merged[name] = kept(name, total if name not in OF_SAMPLES else total * _per_sample(parts, name, starts))
        elif merge == "max":
            with np.errstate(invalid="ignore"):
                merged[name] = np.maximum.reduceat(values, starts)  # NaN wins, on purpose
        elif merge == "min":
            with np.errstate(invalid="ignore"):
                merged[name] = np.minimum.reduceat(values, starts)
        elif merge == "or":
            merged[name] = np.bitwise_or.reduceat(values, starts)
            if EVERY_CALL:  # as merge_measured: what one rank lacks is not known of all
                merged[name] &= ~np.bitwise_or.reduceat(lacking(values), starts)
        elif name in WORST_OF or name in RANK_OF:
            leader = parts.columns.get(WORST_OF.get(name) or RANK_OF[name])
            merged[name] = values[starts if leader is None else _first_worst(leader, starts, group)]
        elif merge == "first":  # from the lowest rank that has one
            there = (values if values.ndim == 1 else values[:, 0]) >= 0
            merged[name] = values[_first_where(there, starts, group)]
        else:  # a hash belongs to one rank: the lowest one's
            merged[name] = values[starts]
    return Parts(
        parts.site[starts], parts.step[starts], parts.rank[starts], parts.attempt[starts], parts.seq[starts], merged
    )


def _per_sample(parts: Parts, name: str, starts: Array) -> Array | float:
    """Of each group: what all of its records count over what those count that measured a sampled sum."""
    columns = [parts.columns.get(of) for of in OF_SAMPLES[name]]
    measured = parts.columns.get("measured")
    if measured is None or any(column is None for column in columns):
        return 1.0
    there = holds(measured, FIELD_BY_NAME[name].group)
    if there.all():
        return 1.0
    first, *less = (np.asarray(column, dtype=np.float64) for column in columns)
    counts = first - sum(less) if less else first
    of_all, of_some = (np.add.reduceat(c, starts) for c in (counts, np.where(there, counts, 0.0)))
    return np.where(of_some > 0, of_all / np.where(of_some > 0, of_some, 1.0), 1.0)


def _first_where(there: npt.NDArray[np.bool_], starts: Array, group: Array) -> Array:
    """Index of the first True of each group; of its first item when there is none."""
    out = starts.copy()
    index = np.flatnonzero(there)[::-1]
    out[group[index]] = index  # the first index is written last, and stays
    return out


def _first_worst(leader: Array, starts: Array, group: Array) -> Array:
    """Index of the first largest value of each group, NaN being larger than all."""
    with np.errstate(invalid="ignore"):
        top = np.maximum.reduceat(leader, starts)[group]
    return _first_where((leader == top) | (np.isnan(leader) & np.isnan(top)), starts, group)


def counted(parts: Parts) -> Records:
    """Final step: decode histograms to counts."""
    columns = {name: COUNTS_OF_CODES[v] if name in HISTOGRAMS else v for name, v in parts.columns.items()}
    return Records(parts.site, parts.step, columns)
