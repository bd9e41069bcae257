"""Many ranks: what lies inside a site's own band is merged over a few steps and leaves as one record.

Shapes:     slab rows [sites] of ROW, once a step -> which of them leave now, and as what
Thread:     training

A row a site a step is what a page can show, and more than ten thousand ranks should send. Rows that say nothing new are
merged as the calls of one step are: extremes, sums of counts, the last of what is kept; the record carries the number of
the last step. What left its band or broke, what is not known yet, and full statistics leave at once and unmerged. Each
site has its own step to leave at, and each rank another one, so that together they have each site in each step.

After a jump a rank by itself sends everything in full for some steps. Many ranks see each site in full in each step
anyway, so of them the sites that jumped alone do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELDS, LATER, ROW, SOME_CALLS, WITH_ENERGIES, Measured, empty_rows, merge_rows

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

    def leaving(self, step: int, rows: Rows, calm: Mask, *, in_burst: bool = False) -> tuple[Mask, Rows]:
        """Take in one step.

        Args:
            step: its number.
            rows: [sites] of ROW; not changed.
            calm: [sites], those whose numbers lie inside their band.
            in_burst: sites were looked at in full because something jumped.

        Returns:
            Which sites leave a record now, and the records of these, in the order of the sites.
        """
        if in_burst:
            rows = _lightened(rows, calm)
        measured = rows["measured"]
        there = measured != 0
        held_back = there & calm & ((measured & ~int(_LIGHT)) == 0) & (rows["scale_ratio_max"] <= _CLIPPED)
        first, again = held_back & ~self._holds, held_back & self._holds
        self._held[first] = rows[first]
        if again.any():
            merged = self._held[again]
            merge_rows(merged, rows[again])
            self._held[again] = merged
        self._holds |= held_back
        now = there & ~held_back
        due = self._holds & ((step + self._turn) % self._steps == 0) & ~now
        leaves = now | due
        out = np.where(due[leaves], self._held[leaves], rows[leaves]).astype(ROW, copy=False)
        self._holds &= ~due
        return leaves, out


def _lightened(rows: Rows, which: Mask) -> Rows:
    """A copy of rows, some of them without what only full statistics have."""
    rows = rows.copy()
    for f in _FULL:
        rows[f.name][which] = f.default
    rows["measured"][which] &= ~int(_HEAVY)
    return rows
