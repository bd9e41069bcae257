"""Where a lasting trend will pass a limit: steps until then, with an interval.

Downstream: fp8watch_server.pages.forecasts
Shapes:     steps [N], values [N] on a scale on which growth is a line (log2 of amax, of a share) -> Forecast | None
Thread:     any; pure functions

The window is cut into bins of equal length, and each speaks by its median, so that single steps move nothing. A trend
lasts where its halves and its last third rise as the whole does, and where it is far above the scatter of the bins. Its
interval is that of the slopes of these parts, widened by `WIDEN` and `WIDEN_LATE`. A line says nothing of a schedule that is about to
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_STEPS = 256
"""Steps that are looked back."""
MIN_STEPS = 128
NUM_BINS = 24
MIN_BINS = 16
STEADY = 0.5
"""The slope of each part over that of the whole, at least: a trend that fades is not lasting."""
ABOVE_SCATTER = 6.0
"""Rise over the window, in robust σ of the bins about their line."""
AHEAD = 4.0
"""A forecast reaches so many times as far ahead as it looks back, and no further."""
WIDEN = 1.5
"""By how much the interval of the slopes is widened towards now."""
WIDEN_LATE = 4.0
"""... and away from it: on a recorded training most trends that seemed to last had slowed down (docs/pages.md)."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Forecast:
    """When a limit will be passed if it goes on as it has."""

    limit: float
    """On the scale of the values."""
    now: float
    """Of the line, at `last_step`."""
    slope: float
    """Per step."""
    soonest: int
    steps: int
    latest: int
    """Steps from `last_step` on: interval, and what the line says."""
    first_step: int
    last_step: int
    """What it was read off."""


def forecast(steps: Array, values: Array, limit: float, window: int = WINDOW_STEPS) -> Forecast | None:
    """Steps until a rising trend passes a limit; None where there is no lasting one, or it lies behind or far ahead.

    Args:
        steps: [N] ascending.
        values: [N]; what is not finite is left out.
        limit: on the scale of the values.
        window: of the last steps.
    """
    kept = np.isfinite(values)
    steps, values = np.asarray(steps)[kept], np.asarray(values, dtype=np.float64)[kept]
    if not len(steps):
        return None
    inside = steps > steps[-1] - window
    steps, values = steps[inside], values[inside]
    span = steps[-1] - steps[0]
    if span < MIN_STEPS:
        return None
    return of_bins(*_bins(steps, values), limit, int(steps[0]), int(steps[-1]))


def of_bins(at: Array, level: Array, limit: float, first: int, last: int) -> Forecast | None:
    """The same of a window that is cut into bins already.

    Args:
        at: [B] steps of the bins, ascending.
        level: [B] their medians.
        limit: on the scale of the level.
        first: step of the window.
        last: step of the window; the forecast counts from here.
    """
    if len(at) < MIN_BINS:
        return None
    slope = _slope(at, level)
    half, third = len(at) // 2, len(at) - len(at) // 3
    parts = [_slope(at[:half], level[:half]), _slope(at[half:], level[half:]), _slope(at[third:], level[third:])]
    if slope <= 0 or min(parts) < STEADY * slope:
        return None
    middle = float(np.median(level - slope * at))
    scatter = 1.4826 * float(np.median(np.abs(level - slope * at - middle)))
    if slope * (at[-1] - at[0]) < ABOVE_SCATTER * scatter:
        return None
    now = middle + slope * last
    gap = limit - now
    if gap <= 0 or gap / slope > AHEAD * (last - first):
        return None
    slopes = [slope, *parts[1:]]
    soonest = max(gap - scatter, 0.0) / max(slopes) / WIDEN
    latest = (gap + scatter) / min(slopes) * WIDEN_LATE
    return Forecast(limit, now, slope, int(soonest), round(gap / slope), int(np.ceil(latest)), first, last)


def _bins(steps: Array, values: Array) -> tuple[Array, Array]:
    """Of each bin that holds anything: the median of its steps and of its values."""
    edges = np.linspace(steps[0], steps[-1] + 1, NUM_BINS + 1)
    number = np.clip(np.searchsorted(edges, steps, "right") - 1, 0, NUM_BINS - 1)
    parts = [(steps[number == i], values[number == i]) for i in range(NUM_BINS)]
    found = [(float(np.median(s)), float(np.median(v))) for s, v in parts if len(s)]
    return np.array([s for s, _ in found]), np.array([v for _, v in found])


def _slope(at: Array, level: Array) -> float:
    """Median of the slopes of all pairs (Theil 1950, Sen 1968)."""
    i, j = np.triu_indices(len(at), 1)
    return float(np.median((level[j] - level[i]) / (at[j] - at[i]))) if len(i) else 0.0
