"""Columnar records, and their merge over batches, attempts and ranks.

Shapes:     columns [N], [N, size]; histograms as codes on the way in, as counts where they were asked for
Thread:     any; only pure functions

Reading from hot batches and from blocks must give bit-identical results, so both go through here: sums are kept to 20
bits of fraction (within 5e-7), histograms that were added over ranks are encoded once more, and three numbers of light
records in order are rounded on their way in (light_rounding).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS
from fp8watch_server.store.block_codec import short_mantissa

Array = npt.NDArray[Any]

COUNTS_OF_CODES: npt.NDArray[np.int64] = np.rint(np.exp2(np.arange(256) / 8.0) - 1.0).astype(np.int64)
"""Integer count of each histogram code: integers sum exactly in any order."""

WORST_OF = {"worst_tile": "amax_max", "amax_steps_back": "amax_max", "noise_tile": "tile_noise_ratio_max"}
"""Places, of a tile or in time, that follow the rank of another column's maximum."""
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
    by_site = _site_major(parts)
    if by_site is not None:
        return parts.take(by_site)
    order = np.lexsort((parts.seq, parts.attempt, parts.rank, parts.step, parts.site))
    keys = [a[order] for a in (parts.site, parts.step, parts.rank, parts.attempt)]
    last = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        last[:-1] = np.logical_or.reduce([k[1:] != k[:-1] for k in keys])
    return parts.take(order[last])


def _site_major(parts: Parts) -> Array | None:
    """Order by site and step, where one source sent the same sites in every step, step by step, each step once; else None.

    That is how most batches come, and it is seen faster than it is sorted.
    """
    n = len(parts)
    if not n or (parts.rank != parts.rank[0]).any() or (parts.attempt != parts.attempt[0]).any():
        return None
    num_sites = int(np.argmax(parts.step != parts.step[0])) or n
    if n % num_sites:
        return None
    steps = parts.step.reshape(-1, num_sites)
    if (steps != steps[:, :1]).any() or (np.diff(steps[:, 0]) <= 0).any():
        return None
    if (parts.site.reshape(-1, num_sites) != parts.site[:num_sites]).any():
        return None
    order = np.argsort(parts.site[:num_sites])
    if (np.diff(parts.site[order]) == 0).any():
        return None
    return np.asarray((order[:, None] + np.arange(0, n, num_sites)).reshape(-1))


def owned(parts: Parts, owner: Mapping[tuple[int, int], int] | None) -> Parts:
    """Keep only records of the attempt that owns their (rank, step): {(rank, step): attempt}. A roll-up, of rank −1, has all
    attempts up to its own."""
    if owner is None:
        return parts
    of = np.array(
        [owner.get(key, -1) for key in zip(parts.rank.tolist(), parts.step.tolist(), strict=True)], dtype=np.int64
    )
    return parts.take(np.flatnonzero(of <= parts.attempt))


def with_denominators(names: Iterable[str]) -> set[str]:
    """Columns that `over_ranks` needs to merge these."""
    asked = set(names)
    return asked.union(*({"measured", *OF_SAMPLES[name]} for name in asked & set(OF_SAMPLES)))


def counted(parts: Parts) -> Records:
    """Final step: decode histograms to counts."""
    columns = {name: COUNTS_OF_CODES[v] if name in HISTOGRAMS else v for name, v in parts.columns.items()}
    return Records(parts.site, parts.step, columns)
