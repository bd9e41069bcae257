"""A logged scalar that stays on another level, by less than a jump: mode 25, scalar-shift, as information.

Shapes:     values [names] per step -> those that stand on a new level
Thread:     detect worker

Rewards and KL terms scatter as far as they shift, so no single value tells. The median of the last twelve values is held
against the 32 before, and against where those were going. How far that statistic strays in health differs from name to
name, so each name is its own measure: a shift is beyond three spreads of one value, and twice the furthest it ever was.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import MAD_TO_SIGMA, Baseline

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BEFORE, LAST = 32, 12
EACH = 4
"""Values from one look to the next."""
SIGMA = 3.0
TIMES = 2.5
"""Times the furthest that this name strayed before."""
MIN_LOOKS = 5
WAITS = 4
"""Looks for which a level that is beyond both may be on its way, and is not learned."""
FORGETS = 0.98
"""Of the furthest, from look to look."""
ONE_SIDE = 11
SPREAD_SHARE = 0.01
_NO_MEASUREMENT = re.compile(
    r"time|second|throughput|tok|memory|\bmem|lr\b|learning_rate|step|epoch|progress|count|num_|tflops|mfu|coef|beta"
)


class Levels:
    """The last values of each name, and how far its level strayed so far."""

    def __init__(self, num_names: int = 0) -> None:
        self._values = Baseline(num_names, BEFORE + LAST)
        self._steps = Baseline(num_names, BEFORE + LAST)
        self._furthest = np.zeros(num_names)
        self._looks = np.zeros(num_names, dtype=np.int64)
        self._waited = np.zeros(num_names, dtype=np.int64)  # looks in a row beyond both

    def grow(self, num_names: int) -> None:
        """More names."""
        more = num_names - len(self._looks)
        self._values.grow(num_names)
        self._steps.grow(num_names)
        self._furthest = np.concatenate([self._furthest, np.zeros(more)])
        self._looks = np.concatenate([self._looks, np.zeros(more, dtype=np.int64)])
        self._waited = np.concatenate([self._waited, np.zeros(more, dtype=np.int64)])

    def forget(self, which: Mask) -> None:
        """Begin anew: the level that is reached is the usual one. How far it strayed stays."""
        self._values.forget(which)
        self._steps.forget(which)

    def shifted(self, names: list[str], value: Floats, step: int) -> list[tuple[int, float, float, int]]:
        """(name's number, level, usual level, first step on it) of those that reached a new level with this value.

        Args:
            names: of all.
            value: NaN where there is none. [names]
            step: of it.
        """
        self._values.push(value)
        self._steps.push(np.where(np.isnan(value), np.nan, float(step)))
        due = ~np.isnan(value) & (self._values.count >= BEFORE + LAST) & (self._values.count % EACH == 0)
        if not due.any():
            return []
        history = self._values.ordered(due).astype(np.float64)
        before, last = history[:, :BEFORE], history[:, BEFORE:]
        half = BEFORE // 2
        slope = (np.median(before[:, half:], axis=1) - np.median(before[:, :half], axis=1)) / half
        off = before - slope[:, None] * (np.arange(BEFORE) - (BEFORE - 1) / 2)
        usual = np.median(off, axis=1)
        spread = MAD_TO_SIGMA * np.median(np.abs(off - usual[:, None]), axis=1)
        spread = np.maximum(spread, np.maximum(SPREAD_SHARE * np.abs(usual), 1e-300))
        level = np.median(last, axis=1)
        flat, ahead = level - usual, level - (usual + slope * (BEFORE + LAST) / 2)
        away = np.where(np.sign(flat) == np.sign(ahead), np.minimum(np.abs(flat), np.abs(ahead)), 0.0)
        strays = away / spread
        rows = np.flatnonzero(due)
        on_side = np.count_nonzero(np.sign(last - usual[:, None]) == np.sign(flat)[:, None], axis=1) >= ONE_SIDE
        beyond = (strays > np.maximum(SIGMA, TIMES * self._furthest[rows])) & (self._looks[rows] >= MIN_LOOKS)
        self._waited[rows] = np.where(beyond, self._waited[rows] + 1, 0)
        new = beyond & on_side
        learned = np.where(beyond & (self._waited[rows] <= WAITS), 0.0, strays)
        self._looks[rows] += 1
        self._furthest[rows] = np.maximum(FORGETS * self._furthest[rows], learned)
        out = []
        for i in np.flatnonzero(new):
            if not _NO_MEASUREMENT.search(names[rows[i]].lower()):
                at = self._steps.ordered(np.arange(len(names)) == rows[i])[0]
                since = at[_split(history[i], (level[i] + usual[i]) / 2, rises=level[i] > usual[i])]
                out.append((int(rows[i]), float(level[i]), float(usual[i]), int(since)))
        found = np.zeros(len(names), dtype=np.bool_)
        found[rows[new]] = True
        self.forget(found)
        return out


def _split(values: Floats, between: float, *, rises: bool) -> int:
    """The first of those on the new level: where fewest values stand on the wrong side of the split."""
    over = (values > between) == rises
    wrong = np.concatenate([[0], np.cumsum(over)]) + np.concatenate([np.cumsum(~over[::-1])[::-1], [0]])
    return min(int(np.argmin(wrong)), len(values) - 1)
