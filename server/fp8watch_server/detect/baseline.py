"""Robust baseline: median, MAD and slope over the last clean observations, for many series at once.

Shapes:     one push of [S] float -> ring [S, window] float32
Thread:     detect worker

A mean and a standard deviation follow the fault that they should find. The median of 32 clean steps does not, and a
baseline that is not fed while its alarm is on cannot learn the fault as the new normal. Each series has its own place
in the ring: a field that is sampled each 64th step has a window of 32 samples, not of 32 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_STEPS = 32
MAD_TO_SIGMA = 1.4826
"""σ of a normal distribution over its median absolute deviation."""

REFRESH_EACH = 4
"""Median and MAD of a full window are taken anew at each fourth push: they move by little, and sorting is the cost."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


class Baseline:
    """The last `window` values of S series. NaN stands for "not measured" and is skipped."""

    def __init__(self, num_series: int, window: int = WINDOW_STEPS) -> None:
        self._ring = np.full((num_series, window), np.nan, dtype=np.float32)
        self._next = np.zeros(num_series, dtype=np.int64)
        self.count = np.zeros(num_series, dtype=np.int64)
        self._since = REFRESH_EACH  # pushes since median and MAD were taken
        self._median = np.full(num_series, np.nan)
        self._mad = np.full(num_series, np.nan)

    @property
    def num_series(self) -> int:
        """S."""
        return len(self._next)

    @property
    def window(self) -> int:
        """Values kept of each series."""
        return int(self._ring.shape[1])

    def grow(self, num_series: int) -> None:
        """More series, behind those that are there."""
        more = num_series - self.num_series
        if more <= 0:
            return
        fresh = Baseline(more, self.window)
        for name in ("_ring", "_next", "count", "_median", "_mad"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))

    def push(self, values: Array, take: npt.NDArray[np.bool_] | None = None) -> None:
        """Take one observation in, where it is a number and `take` allows. [S], [S]"""
        good = ~np.isnan(values) if take is None else ~np.isnan(values) & take
        at = np.flatnonzero(good)
        if not len(at):
            return
        if len(at) == len(good) and bool((self._next == self._next[0]).all()):  # as ever: one place for all of them
            self._ring[:, self._next[0]] = values
            self._next[:] = (self._next[0] + 1) % self.window
            self.count += 1
        else:
            self._ring[at, self._next[at]] = values[at]
            self._next[at] = (self._next[at] + 1) % self.window
            self.count[at] += 1
        self._since += 1

    def forget(self, which: npt.NDArray[np.bool_] | None = None) -> None:
        """Begin anew, for all series or some."""
        at = slice(None) if which is None else which
        self._ring[at] = np.nan
        self._next[at], self.count[at] = 0, 0
        self._since = REFRESH_EACH

    def ordered(self, which: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float32]:
        """Values in the order they came, oldest first, NaN in front where there are fewer. [S or chosen, window]"""
        rows = np.arange(self.num_series) if which is None else np.flatnonzero(which)
        at = (self._next[rows, None] + np.arange(self.window)) % self.window
        return np.asarray(self._ring[rows[:, None], at])

    def oldest(self) -> Floats:
        """The first value of each full series; NaN of those that hold fewer. [S]"""
        return self._ring[np.arange(self.num_series), self._next].astype(np.float64)

    def median(self) -> Floats:
        """Per series; NaN where nothing was measured. [S]"""
        self._refresh()
        return self._median

    def spread(self, floor: float | Array = 0.0) -> Floats:
        """Robust σ per series, never below `floor`; NaN where nothing was measured. [S]"""
        self._refresh()
        return np.maximum(MAD_TO_SIGMA * self._mad, floor)

    def slope(self, last: int | None = None) -> Floats:
        """Median difference of neighbours, per observation: growth that single jumps do not move. [S]"""
        history = self.ordered().astype(np.float64)
        if last is not None:
            history = history[:, -last - 1 :]
        return nanmedian(np.diff(history, axis=1))

    def _refresh(self) -> None:
        if self._since == 0:
            return
        used = self.count > 0  # sites that this is not about have nothing to sort
        if self._since < REFRESH_EACH and int(self.count[used].min(initial=1 << 30)) >= self.window:
            return
        self._since = 0
        ring = self._ring if bool(used.all()) else self._ring[used]
        median = nanmedian(ring)
        mad = nanmedian(np.abs(ring - median[:, None].astype(np.float32)))
        self._median, self._mad = np.full(self.num_series, np.nan), np.full(self.num_series, np.nan)
        self._median[used], self._mad[used] = median, mad


def nanmedian(values: Array) -> Floats:
    """Median over the last axis without NaN; np.nanmedian warns where there is nothing, and nothing is normal here."""
    num_series, width = values.shape
    if not width or not num_series:
        return np.full(num_series, np.nan)
    ordered = np.sort(values, axis=1)  # NaN goes last
    count = width - np.count_nonzero(np.isnan(ordered), axis=1)
    series = np.arange(num_series)
    low = ordered[series, np.maximum(count - 1, 0) // 2].astype(np.float64)
    high = ordered[series, np.minimum(count // 2, width - 1)].astype(np.float64)
    return np.where(count > 0, (low + high) / 2, np.nan)
