"""Robust baseline: median, MAD and slope over the last clean steps, for many series at once.

Upstream:   fp8watch_server.detect.view      Downstream: fp8watch_server.detect.trend
Shapes:     one push of [S] float -> ring [window, S] float32
Thread:     detect worker

A mean and a standard deviation follow the fault that they should find. The median of 32 clean steps does not, and a
baseline that is not fed while its alarm is on cannot learn the fault as the new normal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_STEPS = 32
MAD_TO_SIGMA = 1.4826
"""σ of a normal distribution over its median absolute deviation."""

ROLE_FLOOR_OCTAVES = {"input": 0.12, "weight": 0.01, "grad_output": 0.5}
"""Smallest spread of log2 amax that is believed, by role: below it, a quiet series would alarm at nothing."""

Array = npt.NDArray[Any]


class Baseline:
    """The last `window` values of S series. NaN stands for "not measured" and is skipped."""

    def __init__(self, num_series: int, window: int = WINDOW_STEPS) -> None:
        self._ring = np.full((window, num_series), np.nan, dtype=np.float32)
        self._next = 0
        self.num_pushed = 0

    @property
    def num_series(self) -> int:
        """S."""
        return int(self._ring.shape[1])

    def push(self, values: Array) -> None:
        """Take one clean step in. [S]"""
        self._ring[self._next] = values
        self._next = (self._next + 1) % len(self._ring)
        self.num_pushed += 1

    def remap(self, source: npt.NDArray[np.int64]) -> None:
        """Reorder the series: new series i is old series source[i], or empty where that is −1."""
        ring = np.full((len(self._ring), len(source)), np.nan, dtype=np.float32)
        ring[:, source >= 0] = self._ring[:, source[source >= 0]]
        self._ring = ring

    def history(self) -> npt.NDArray[np.float32]:
        """Values in the order they came, oldest first. [min(num_pushed, window), S]"""
        if self.num_pushed < len(self._ring):
            return self._ring[: self.num_pushed]
        return np.roll(self._ring, -self._next, axis=0)

    def median(self) -> npt.NDArray[np.float64]:
        """Per series; NaN where nothing was measured. [S]"""
        return _nanmedian(self._ring)

    def spread(self, floor: float = 0.0) -> npt.NDArray[np.float64]:
        """Robust σ per series, never below `floor`; NaN where nothing was measured. [S]"""
        deviation = _nanmedian(np.abs(self._ring - self.median()[None, :]))
        return np.maximum(MAD_TO_SIGMA * deviation, floor)

    def slope(self) -> npt.NDArray[np.float64]:
        """Median of the differences of neighbours, per step: growth that single jumps do not move. [S]"""
        return _nanmedian(np.diff(self.history().astype(np.float64), axis=0))


def _nanmedian(values: Array) -> npt.NDArray[np.float64]:
    """Median over the first axis without NaN; np.nanmedian warns where there is nothing, and nothing is normal here."""
    num_series = values.shape[1]
    if not len(values):
        return np.full(num_series, np.nan)
    ordered = np.sort(values.astype(np.float64), axis=0)  # NaN goes last
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    series = np.arange(num_series)
    low = ordered[np.maximum(count - 1, 0) // 2, series]
    high = ordered[np.maximum(count, 1) // 2, series]
    return np.where(count > 0, (low + high) / 2, np.nan)
