"""Merge over ranks: one rank after the other into one record of each site and step, as each field merges.

Shapes:     Parts of a rank, any number of times -> Parts [M], one of each (site, step)
Thread:     compactor, query pool; pure

The roll-up adds sheet after sheet, so that a thousand ranks take the memory of one; queries of cells without a roll-up add
what they have read. Both go through here, rank by rank in the same order, so their sums agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import EVERY_CALL, FIELD_BY_NAME, HISTOGRAMS, holds, lacking
from fp8watch_agent.wire import encode_histogram
from fp8watch_server.store.records import (
    COUNTS_OF_CODES,
    OF_SAMPLES,
    RANK_OF,
    WORST_OF,
    Parts,
    default_of,
    dtype_of,
    kept,
    size_of,
)

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp] | slice

_IDENTITY = {"sum": -0.0, "max": -np.inf, "min": np.inf, "or": 0}
"""What changes nothing that is merged into it; −0.0 keeps the sign of a sum's zero."""


class RankMerge:
    """Records of `num_slots` places, merged from ranks in ascending order.

    Ranks take full statistics in turn. A sampled sum of some ranks stands for all of them, in proportion to the tiles or
    elements that it was taken over: ratios of the result (SQNR, kurtosis) are those of the ranks that measured.
    """

    def __init__(self, num_slots: int) -> None:
        self._m = num_slots
        self.seen = np.zeros(num_slots, dtype=bool)
        self._columns: dict[str, Array] = {}
        self._lacking = np.zeros(num_slots, dtype=np.int32)
        self._over: dict[str, tuple[Array, Array]] = {}  # sampled sums: what all count, what those count that measured

    def add(self, columns: Mapping[str, Array], at: Index) -> None:
        """Merge a rank's records into the places `at`, each named once. A column that is missing is at its default."""
        for name in columns:
            if name not in self._columns:
                self._columns[name] = self._begin(name)
        n = self._m if isinstance(at, slice) and at == slice(None) else len(self.seen[at])
        new = ~self.seen[at]
        fresh = bool(new.all())
        given = {
            name: columns[name]
            if name in columns
            else np.broadcast_to(np.asarray(default_of(name)), self._shape(name, n))
            for name in self._columns
        }
        for name, values in given.items():  # before the maxima that they follow are raised
            if name in WORST_OF or name in RANK_OF:
                self._follow(name, values, given, at, new)
        for name, values in given.items():
            self._merge(name, values, at, new, fresh)
        self._count_samples(given, at, n)
        self.seen[at] = True

    def _shape(self, name: str, n: int) -> tuple[int, ...]:
        size = size_of(name)
        return (n,) if size == 1 else (n, size)

    def _begin(self, name: str) -> Array:
        """Places of a column: at its default where a rank without it has been."""
        if name in HISTOGRAMS:
            return np.zeros((size_of(name), self._m), dtype=np.int64)
        merge = "of" if name in RANK_OF else FIELD_BY_NAME[name].merge
        dtype = np.dtype(dtype_of(name))
        start = _IDENTITY.get(merge, default_of(name))
        if dtype.kind == "i" and not np.isfinite(start):
            start = np.iinfo(dtype).min if start < 0 else np.iinfo(dtype).max
        out = np.full(self._shape(name, self._m), start, dtype=dtype)
        out[self.seen] = default_of(name)
        return out

    def _merge(self, name: str, values: Array, at: Index, new: Array, fresh: bool) -> None:
        into = self._columns[name]
        if name in HISTOGRAMS:
            for bucket in np.flatnonzero(values.any(axis=0)).tolist():
                into[bucket, at] += COUNTS_OF_CODES[values[:, bucket]]
            return
        if name in WORST_OF or name in RANK_OF:
            return
        merge = FIELD_BY_NAME[name].merge
        if merge in ("sum", "max", "min", "or"):
            with np.errstate(over="ignore", invalid="ignore"):  # NaN wins, on purpose
                if merge == "sum":
                    into[at] += values
                elif merge == "max":
                    into[at] = np.maximum(into[at], values)
                elif merge == "min":
                    into[at] = np.minimum(into[at], values)
                else:
                    into[at] |= values
                    if EVERY_CALL:  # as merge_measured: what one rank lacks is not known of all
                        self._lacking[at] |= lacking(values)
        elif fresh:
            into[at] = values
        else:  # a hash belongs to one rank: the lowest one's; a first place is from the lowest rank that has one
            before = into[at]
            take = new
            if merge == "first":
                one, other = (a if a.ndim == 1 else a[:, 0] for a in (before, values))
                take = new | ((one < 0) & (other >= 0))
            into[at] = np.where(take if before.ndim == 1 else take[:, None], values, before)

    def _follow(self, name: str, values: Array, given: Mapping[str, Array], at: Index, new: Array) -> None:
        """Coordinates and ranks belong to the first largest value of another column, NaN being larger than all."""
        into = self._columns[name]
        before = into[at]
        take = new
        leader = WORST_OF.get(name) or RANK_OF[name]
        if leader in given:
            top, other = self._columns[leader][at], given[leader]
            with np.errstate(invalid="ignore"):
                take = new | (other > top) | (np.isnan(other) & ~np.isnan(top))
        into[at] = np.where(take if before.ndim == 1 else take[:, None], values, before)

    def _count_samples(self, given: Mapping[str, Array], at: Index, n: int) -> None:
        measured = given.get("measured")
        for name, of in OF_SAMPLES.items():
            if name not in given or measured is None or any(column not in given for column in of):
                continue
            if name not in self._over:
                self._over[name] = np.zeros(self._m), np.zeros(self._m)
            first, *less = (np.asarray(given[column], dtype=np.float64) for column in of)
            counts = first - sum(less) if less else first
            of_all, of_some = self._over[name]
            of_all[at] += counts
            of_some[at] += np.where(holds(measured, FIELD_BY_NAME[name].group), counts, 0.0)

    def columns(self) -> dict[str, Array]:
        """The merged columns of the places that have a record. Histograms are codes again."""
        there: Index = slice(None) if self.seen.all() else np.flatnonzero(self.seen)
        out: dict[str, Array] = {}
        for name, values in self._columns.items():
            if name in HISTOGRAMS:
                codes = np.zeros(values.shape, np.uint8).T  # bucket by bucket in memory
                for bucket in np.flatnonzero(values.any(axis=1)).tolist():
                    codes[:, bucket] = encode_histogram(values[bucket])
                out[name] = codes[there]
                continue
            if name in self._over:
                of_all, of_some = self._over[name]
                with np.errstate(over="ignore", invalid="ignore"):
                    values = values * np.where(of_some > 0, of_all / np.where(of_some > 0, of_some, 1.0), 1.0)
            if name not in RANK_OF and FIELD_BY_NAME[name].merge == "sum":
                values = kept(name, values)
            elif name == "measured" and EVERY_CALL:
                values = values & ~self._lacking
            out[name] = values[there]
        return out


def over_ranks(parts: Parts) -> Parts:
    """Merge the ranks of each (site, step). Sorted by site, step, rank; rank and attempt of the result are those of the
    first. Histograms stay codes.
    """
    n = len(parts)
    first = np.ones(n, dtype=bool)
    if n > 1:
        first[1:] = (parts.site[1:] != parts.site[:-1]) | (parts.step[1:] != parts.step[:-1])
    if first.all():
        return parts
    starts = np.flatnonzero(first)
    lengths = np.diff(np.concatenate([starts, [n]]))
    merge = RankMerge(len(starts))
    each = int(lengths[0])
    if bool((lengths == each).all()):
        for k in range(each):
            merge.add({name: values[k::each] for name, values in parts.columns.items()}, slice(None))
    else:
        group = np.repeat(np.arange(len(starts)), lengths)
        turn = np.arange(n) - starts[group]
        order = np.argsort(turn, kind="stable")
        for rows in np.split(order, np.cumsum(np.bincount(turn))[:-1]):
            merge.add({name: values[rows] for name, values in parts.columns.items()}, group[rows])
    return Parts(
        parts.site[starts], parts.step[starts], parts.rank[starts], parts.attempt[starts], parts.seq[starts],
        merge.columns(),
    )  # fmt: skip
