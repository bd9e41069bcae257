"""The order of records in a column of the wire: site by site, and what each adds to the one before it.

Shapes:     words [fields, records] <-> [fields, N]: the first of each site, then differences
Thread:     sender (fold), collector (unfold); pure

A site's numbers change little from step to step, and sites that read one tensor change alike: side by side they compress
best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def zigzag(words: Array, bits: int) -> Array:
    """Differences mod 2^bits as small numbers: d becomes 2d, or −2d − 1 where it is negative."""
    kind = words.dtype.type
    mask = kind((1 << bits) - 1)
    words = words & mask
    return np.asarray(((words << kind(1)) ^ (kind(0) - (words >> kind(bits - 1)))) & mask)


def unzigzag(words: Array, bits: int) -> Array:
    """Inverse of `zigzag`."""
    kind = words.dtype.type
    return np.asarray(((words >> kind(1)) ^ (kind(0) - (words & kind(1)))) & kind((1 << bits) - 1))


@dataclass(frozen=True)
class SiteMajor:
    """Places of N records.

    Args:
        index: [N], numbers of the records, those of a site next to each other, by step.
        first: [N] bool, whether a record is the first of its site. True at 0.
        num_records: of the batch: as many as `index`, or more where these are some of them.
    """

    index: npt.NDArray[np.intp]
    first: npt.NDArray[np.bool_]
    num_records: int

    @classmethod
    def of_batch(cls, there: npt.NDArray[np.bool_]) -> SiteMajor:
        """Of records that lie step by step, [steps, sites]: which of them there are."""
        num_steps, num_sites = there.shape
        number = np.cumsum(there.reshape(-1)).reshape(there.shape) - 1
        here = there.T.reshape(-1)
        site = np.repeat(np.arange(num_sites), num_steps)[here]
        return cls(np.ascontiguousarray(number.T.reshape(-1)[here]), _begins(site), int(here.sum()))

    def some(self, has: npt.NDArray[np.bool_]) -> SiteMajor:
        """Those of the records, [num_records] bool, that have something."""
        if has.all():
            return self
        here = has[self.index]
        return SiteMajor(self.index[here], _begins(self.site[here]), self.num_records)

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def num_first(self) -> int:
        """Number of sites."""
        return int(self.first.sum())

    @cached_property
    def site(self) -> npt.NDArray[np.intp]:
        """Number of the site of each place, from 0 on. [N]"""
        return np.cumsum(self.first) - 1

    def fold(self, words: Array, bits: int) -> Array:
        """Words of all records of the batch [fields, num_records] -> [fields, N]."""
        words = np.take(words, self.index, axis=1)
        rest = np.flatnonzero(~self.first)
        differences = np.take(words, rest, axis=1) - np.take(words, rest - 1, axis=1)
        return np.concatenate([np.compress(self.first, words, axis=1), zigzag(differences, bits)], axis=1)

    def unfold(self, words: Array, bits: int) -> Array:
        """Inverse of `fold`, in the order of `index`."""
        out = np.empty_like(words)
        out[:, self.first] = words[:, : self.num_first]
        out[:, ~self.first] = unzigzag(words[:, self.num_first :], bits)
        return np.asarray(self.sums(out) & words.dtype.type((1 << bits) - 1))

    def sums(self, values: Array) -> Array:
        """Along each site, modulo the dtype: [fields, N, …] of first values and differences -> values."""
        if len(self) == self.num_first:
            return values
        each = len(self) // self.num_first
        if len(self) == each * self.num_first and self.first[::each].all():
            shaped = values.reshape(len(values), self.num_first, each, *values.shape[2:])
            return np.cumsum(shaped, axis=2, dtype=values.dtype).reshape(values.shape)
        running = np.cumsum(values, axis=1, dtype=values.dtype)
        before = (running - values)[:, self.first]
        return np.asarray(running - before[:, self.site])

    def put(self, values: Array, into: Array) -> None:
        """Write values by place [fields, N, …] into an array by record [fields, num_records, …]."""
        into[:, self.index] = values


def _begins(site: Array) -> npt.NDArray[np.bool_]:
    first = np.ones(len(site), dtype=bool)
    first[1:] = site[1:] != site[:-1]
    return first
