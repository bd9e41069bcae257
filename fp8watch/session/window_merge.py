"""Many ranks: what lies inside a site's own band is merged over a few steps and leaves as one record.

Shapes:     slab rows [sites] of ROW, once a step -> which of them leave now, as what, and which windows end before
Thread:     training

A row a site a step is what a page can show, and more than ten thousand ranks should send. Rows that say nothing new are
merged as the calls of one step are: extremes, sums of counts, the last of what is kept. The record has the number of the
last step; `window_steps_back` says where it begins, `amax_steps_back` in which step its largest amax lay. What left its
band or broke, what is not known yet, and full statistics leave at once and unmerged. What left its band or broke ends
the window before it, which leaves with it as a record of the step before, so that no record has rows from both sides of
an event. Each site has its own step to leave at, and each rank another one, so that together they have each site in each
step.

After a jump a rank by itself sends everything in full for some steps. Many ranks see each site in full in each step
anyway, so of them the sites that jumped alone do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELDS, LATER, SOME_CALLS, WITH_ENERGIES, Measured, empty_rows, merge_rows

MANY_RANKS = 256
"""Ranks from which on rows are merged where nobody says otherwise."""
MERGE_STEPS = 16

_LIGHT = (
    Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.CODES
    | LATER & ~SOME_CALLS & ~WITH_ENERGIES
)  # fmt: skip
_CLIPPED = 1.5  # amax·scale over FP8_MAX: a history is often a little behind, and this is more than that
_HEAVY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH | WITH_ENERGIES
_FULL = tuple(f for f in FIELDS if f.group & _HEAVY)

Rows = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]


def steps_to_merge(asked: int, world_size: int) -> int:
    """So many steps share a record.

    Args:
        asked: FP8WATCH_MERGE_STEPS; 0 where nothing was said.
        world_size: number of ranks.
    """
    return asked or (MERGE_STEPS if world_size >= MANY_RANKS else 1)


class Leaving(NamedTuple):
    """What leaves with a step."""

    now: Mask  # [sites], those that leave a record of this step
    records: Rows  # their records, in the order of the sites
    before: Mask  # [sites], those whose window ends with the step before: what comes now is not mixed with it
    windows: Rows  # their records, of the step before


class WindowMerge:
    """Holds back the rows of one rank that say nothing new.

    Args:
        num_rows: of the slab.
        steps: that share a record at most.
        rank: moves the steps at which rows leave.
    """

    def __init__(self, num_rows: int, steps: int, rank: int = 0) -> None:
        self._steps = steps
        self._turn = (np.arange(num_rows) + rank) % steps
        self._held = empty_rows(num_rows)
        self._holds = np.zeros(num_rows, dtype=np.bool_)
        self._first = np.zeros(num_rows, dtype=np.int64)  # step of the first row that is held
        self._amax_at = np.zeros(num_rows, dtype=np.int64)  # step of its largest amax
        self._last = -1  # the step that was taken in last

    def leaving(self, step: int, rows: Rows, calm: Mask | None, *, in_burst: bool = False) -> Leaving:
        """Take in one step.

        Args:
            step: its number.
            rows: [sites] of ROW; not changed.
            calm: [sites], those whose numbers lie inside their band; None: something broke, and nothing is held back.
            in_burst: sites were looked at in full because something jumped.
        """
        apart = step - self._last
        ends = calm is None or apart <= 0  # training went back: what is held was before
        calm = np.zeros(len(rows), dtype=np.bool_) if calm is None else calm
        if in_burst:
            rows = _lightened(rows, calm)
        measured = rows["measured"]
        there = measured != 0
        inside = calm & (rows["scale_ratio_max"] <= _CLIPPED)
        held_back = there & inside & ((measured & ~int(_LIGHT)) == 0)
        before = self._holds & (ends | there & ~inside | (step - self._first > self._steps))
        windows = self._close(before, self._last)
        self._take(step, rows, held_back)
        now = there & ~held_back
        due = ((step + self._turn) % self._steps == 0) | (step - self._first + apart >= self._steps)
        due &= self._holds & ~now
        self._last = step
        leaves = now | due
        records: Rows = rows[leaves]
        records[due[leaves]] = self._close(due, step)
        return Leaving(leaves, records, before, windows)

    def rest(self) -> tuple[Mask, Rows]:
        """Which sites hold something back, and their windows, which end with the last step: no step goes on with them."""
        before = self._holds.copy()
        return before, self._close(before, self._last)

    def _take(self, step: int, rows: Rows, which: Mask) -> None:
        again, larger = which & self._holds, rows["amax_max"] > self._held["amax_max"]
        first = which & ~self._holds
        self._held[first] = rows[first]
        self._first[first] = step
        self._amax_at[first | again & larger] = step
        if again.any():
            merged = self._held[again]
            merge_rows(merged, rows[again])
            self._held[again] = merged
        self._holds |= which

    def _close(self, which: Mask, step: int) -> Rows:
        """The windows of some sites, as records of the step with which they end."""
        out: Rows = self._held[which]
        out["window_steps_back"] = step - self._first[which]
        several = out["window_steps_back"] > 0
        out["amax_steps_back"] = np.where(several, step - self._amax_at[which], 0)
        out["measured"][several] |= int(Measured.WINDOW)
        self._holds &= ~which
        return out


def _lightened(rows: Rows, which: Mask) -> Rows:
    """A copy of rows, some of them without what only full statistics have."""
    rows = rows.copy()
    for f in _FULL:
        rows[f.name][which] = f.default
    rows["measured"][which] &= ~int(_HEAVY)
    return rows
