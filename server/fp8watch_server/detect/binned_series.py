"""Medians of equal bins of steps, for many series at once: what a forecast looks back on.

Shapes:     one push of [S] -> ring [S, NUM_BINS] float32
Thread:     detect worker

A bin is closed when a step of a later one comes. What was not measured in a bin is NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import nanmedian
from fp8watch_server.detect.trend import AHEAD, MIN_BINS, NUM_BINS, WINDOW_STEPS, Forecast, of_bins

BIN_STEPS = -(-WINDOW_STEPS // NUM_BINS)
AT_ONCE = 64
"""Series that are looked at closely after a bin: those that are nearest to their limit, by their first and last third."""

Array = npt.NDArray[np.float64]


class BinnedSeries:
    """The last bins of S series."""

    def __init__(self, num_series: int) -> None:
        self._ring = np.full((num_series, NUM_BINS), np.nan, dtype=np.float32)
        self._open = np.full((num_series, BIN_STEPS), np.nan, dtype=np.float32)
        self._number = -1  # of the open bin

    def __len__(self) -> int:
        return len(self._ring)

    def grow(self, num_series: int) -> None:
        """More series, behind those that are there."""
        more = num_series - len(self)
        if more > 0:
            fresh = BinnedSeries(more)
            self._ring = np.concatenate([self._ring, fresh._ring])
            self._open = np.concatenate([self._open, fresh._open])

    def forget(self) -> None:
        """Begin anew."""
        self._ring[:], self._open[:], self._number = np.nan, np.nan, -1

    def begin(self, step: int) -> bool:
        """Go on to a step; whether that closed a bin. A step before the open bin begins anew."""
        number = step // BIN_STEPS
        passed = number - self._number
        if self._number < 0 or passed < 0:
            self.forget()
            self._number = number
            return False
        if passed == 0:
            return False
        passed = min(passed, NUM_BINS)
        ring = np.full_like(self._ring, np.nan)
        ring[:, : NUM_BINS - passed] = self._ring[:, passed:]
        ring[:, NUM_BINS - passed] = nanmedian(self._open)
        self._ring, self._open = ring, np.full_like(self._open, np.nan)
        self._number = number
        return True

    def push(self, step: int, values: Array) -> None:
        """Values of a step of the open bin; NaN: not measured. [S]"""
        self._open[:, step % BIN_STEPS] = values

    def forecasts(self, limit: Array) -> dict[int, Forecast]:
        """Series -> when it passes its limit, where a trend lasts. Asked behind `begin` that closed a bin.

        Args:
            limit: on the scale of the values; NaN where there is none. [S]
        """
        third = NUM_BINS // 3
        rise = nanmedian(self._ring[:, -third:]) - nanmedian(self._ring[:, :third])
        with np.errstate(invalid="ignore", divide="ignore"):
            ahead = (limit - nanmedian(self._ring[:, -third:])) / rise * (NUM_BINS - third) * BIN_STEPS
            near = (rise > 0) & (ahead > 0) & (ahead < (AHEAD + 1) * NUM_BINS * BIN_STEPS)
        near &= np.count_nonzero(~np.isnan(self._ring), axis=1) >= MIN_BINS
        near &= ~np.isnan(self._ring[:, -1])
        rows = np.flatnonzero(near)
        found = {}
        for row in rows[np.argsort(ahead[rows], kind="stable")][:AT_ONCE]:
            said = self._of(int(row), float(limit[row]))
            if said is not None:
                found[int(row)] = said
        return found

    def _of(self, row: int, limit: float) -> Forecast | None:
        level = self._ring[row].astype(np.float64)
        kept = np.flatnonzero(~np.isnan(level))
        begins = (self._number - NUM_BINS + kept) * BIN_STEPS
        return of_bins(
            begins + (BIN_STEPS - 1) / 2, level[kept], limit, int(begins[0]), int(begins[-1]) + BIN_STEPS - 1
        )
