"""k of n: a test of one step is a hint; several within a few observations open an alarm.

Shapes:     hits [S] bool -> open [S] bool
Thread:     detect worker

Opens on k hits within the last n observations of a series, closes after 20 observations without one. While a series is
open its baseline is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
MAX_WINDOW = 32
MAX_GROUPS = 8
"""Of alarms that began apart: the last of them holds all that came later."""


class Latch:
    """k of n, for S series."""

    def __init__(self, num_series: int, k: int, n: int, close_after: int = 20) -> None:
        self._k, self._n, self._close_after = k, n, close_after
        self._bits = np.zeros(num_series, dtype=np.uint32)
        self._clean = np.zeros(num_series, dtype=np.int64)
        self.open = np.zeros(num_series, dtype=np.bool_)
        self.since = np.full(num_series, -1, dtype=np.int64)

    def grow(self, num_series: int) -> None:
        """More series, behind those that are there."""
        more = num_series - len(self.open)
        if more <= 0:
            return
        fresh = Latch(more, self._k, self._n, self._close_after)
        for name in ("_bits", "_clean", "open", "since"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))

    def forget(self) -> None:
        """Begin anew."""
        self._bits[:], self._clean[:], self.open[:], self.since[:] = 0, 0, False, -1

    def update(self, hit: Mask, seen: Mask, step: int, certain: Mask | None = None) -> Mask:
        """Take one observation in; returns where the alarm is open and was hit now.

        Args:
            hit: the test says so. [S]
            seen: what the test needs was measured. [S]
            step: number of the step; `since` remembers that of the first hit.
            certain: hits that open an alarm alone. [S]
        """
        hit = hit & seen if certain is None else (hit | certain) & seen
        if not hit.any() and not self._bits.any() and not self.open.any():
            return hit
        mask = np.uint32((1 << self._n) - 1)
        self._bits = np.where(seen, ((self._bits << np.uint32(1)) | hit) & mask, self._bits)
        fresh = hit & (self.since < 0)
        self.since[fresh] = step
        self._clean = np.where(hit, 0, np.where(seen, self._clean + 1, self._clean))
        self.open |= _num_bits(self._bits) >= self._k
        if certain is not None:
            self.open |= certain & seen
        over = self.open & (self._clean >= self._close_after)
        self.open &= ~over
        self.since[over | (~self.open & (self._bits == 0))] = -1
        return self.open & hit


def began_apart(rows: Rows, latches: Sequence[Latch], within: float) -> list[Rows]:
    """Rows of open alarms, those together whose alarms began together, the oldest first: what begins elsewhere long after is another
    failure, and has a place of its own.

    Args:
        rows: series that are open in one of the latches at least; their order is kept. [N]
        latches: whichever of them opened first counts.
        within: steps that may lie between the first and the last of a group.
    """
    never = np.iinfo(np.int64).max
    since = np.min([np.where(latch.open[rows], latch.since[rows], never) for latch in latches], axis=0)
    begins: list[int] = []
    for step in np.unique(since).tolist():
        if not begins or (step > begins[-1] + within and len(begins) < MAX_GROUPS):
            begins.append(step)
    group = np.searchsorted(begins, since, side="right") - 1
    return [rows[group == k] for k in range(len(begins))]


def _num_bits(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    return np.asarray(np.unpackbits(bits.view(np.uint8).reshape(len(bits), 4), axis=1).sum(axis=1), dtype=np.int64)
