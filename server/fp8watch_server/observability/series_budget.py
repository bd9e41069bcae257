"""How many series an answer of /metrics may still have, and which of two values of one series is told.

Shapes:     number of series -> taken or counted as left out
Thread:     query pool
"""

from __future__ import annotations

import math


class SeriesBudget:
    """Number of series that may still be written."""

    def __init__(self, num_series: int) -> None:
        self.left = num_series
        self.dropped = 0

    def take(self, count: int = 1) -> bool:
        """Whether as many more fit; where not, they are counted as left out."""
        if count > self.left:
            self.dropped += count
            return False
        self.left -= count
        return True


def worse(a: float | None, b: float, worst: str) -> float:
    """The worse of two values; `worst` is min or max, and NaN is worse than any number."""
    if a is None or math.isnan(b):
        return b
    if math.isnan(a):
        return a
    return min(a, b) if worst == "min" else max(a, b)
