"""Whether a weight moved as a whole while its largest and smallest tile amax stood: mode 4, dead-layer.

Shapes:     hashes, counts and sums of the weights [S] per step -> masks [S]
Thread:     detect worker

An amax is one element, and that stands by itself where nothing pulls it: in a row behind a unit that is dead, where weight decay
rounds to nothing. Two looks in such a time tell what the others did. The hash is over every bit: alike, the weight stood;
different, it moved. Sums over the same number of elements that differ say that it moved; alike they say little, for they travel
in 12 bits of fraction, which the updates of many elements leave as they are: of a weight that sends no hash they are taken for
standing after some samples in a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.step_view import Mask

SUMS = ("moment2", "moment4", "signal_energy")
"""Of full samples: over all elements, and of nothing but the weight."""
ALIKE_SAMPLES = 3
"""Samples whose sums are those of the one before, without a hash that could tell."""


class WholeWeights:
    """What weights did as a whole since their extremes stand."""

    def __init__(self, num_sites: int) -> None:
        self.stood = np.zeros(num_sites, dtype=np.bool_)
        self.moved = np.zeros(num_sites, dtype=np.bool_)
        self._hash = np.full(num_sites, np.nan)  # the last of the time in which its extremes stand
        self._hashed = np.zeros(num_sites, dtype=np.bool_)  # it sends hashes
        self._sums = np.full(
            (num_sites, 1 + len(SUMS)), np.nan
        )  # elements, and sums over them, of its last full sample
        self._alike = np.zeros(num_sites, dtype=np.int64)

    def grow(self, fresh: WholeWeights) -> None:
        """More sites were registered."""
        for name in ("stood", "moved", "_hash", "_hashed", "_sums", "_alike"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))

    def forget(self, rows: Mask) -> None:
        """Extremes of weights moved, or a new session began: what was seen before says nothing any more. [S]"""
        self.stood[rows], self.moved[rows] = False, False
        self._hash[rows], self._sums[rows], self._alike[rows] = np.nan, np.nan, 0

    def look(self, now: CrossRankStep, rank: npt.NDArray[np.int64], standing: Mask) -> None:
        """Take a step in.

        Args:
            now: the step.
            rank: whose records are looked at. [S]
            standing: weights whose extremes are, after an update, what they were in the look before. [S]
        """
        here = np.column_stack([now.of_rank(name, rank) for name in ("num_elements", *SUMS)])
        full = standing & np.isfinite(here).all(axis=1)
        both = full & (here[:, 0] == self._sums[:, 0])
        alike = (here == self._sums).all(axis=1)
        self._alike[full] = np.where(both & alike, self._alike + 1, 0)[full]
        self._sums[full] = here[full]
        self._say(both & ~alike, stood=False)
        self._say(~self._hashed & (self._alike >= ALIKE_SAMPLES), stood=True)
        bits = now.of_rank("weight_hash", rank)
        known = np.isfinite(bits)
        self._hashed |= known
        both = standing & known & np.isfinite(self._hash)
        self._say(both & (bits == self._hash), stood=True)
        self._say(both & (bits != self._hash), stood=False)
        self._hash[standing & known] = bits[standing & known]

    def _say(self, rows: Mask, *, stood: bool) -> None:
        self.stood[rows], self.moved[rows] = stood, not stood
