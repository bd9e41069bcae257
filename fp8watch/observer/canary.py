"""Whose turn it is: one module after the other has its quantisers and its GEMMs checked, for as long as training runs.

Thread:     training, and autograd's

In the first steps of a session each module has a turn, and once more after something broke or jumped. From then on one
module after the other has one, as often as fits into `SHARE` of the time that training takes: what a turn has cost, in
seconds of the training thread, decides how long the next one waits. The overhead budget counts that share. A step whose
cost is being measured is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SHARE, LEAST_SHARE = 0.003, 0.001
"""Of the time of training that turns may take after the first steps: at most, and whatever else observing takes."""

FIRST_STEPS = 16
"""Steps in which every module has its first turn."""

MAX_TRIES = 2
"""Steps that a module's turn waits for it to be called: an expert without tokens must not keep the others waiting."""


@dataclass
class Canary:
    """The turns of one attach: of modules that compute in FP8, each known by its first row of the slab.

    Linears have `rows_each` rows each, from 0 on; modules behind them ask for their turn by their first row.
    """

    firsts: Sequence[int] = ()
    rows_each: int = 1
    share: float = SHARE
    reads_rows: bool = True  # of what a site reads and makes, in its full samples
    phase: int = 0  # of this turn: which tiles, rows and columns are looked at
    forced: frozenset[int] = frozenset()  # first rows of Linears whose GEMMs are checked in each sampled step
    turn: frozenset[int] = frozenset()  # first rows of Linears whose turn it is in this step
    spent_s: float = 0.0  # by this turn
    measured: float = math.inf  # what a turn took, of the time until the next began; after the first sweep
    due: float = math.inf  # when the next turn may begin, by `time.perf_counter`
    followed: int = -1  # the last step of a burst that was heard of
    _next: int = 0  # module
    _to_sweep: int = 0  # modules that have a turn whatever it costs
    _since: float = 0.0  # when the last turn began
    _tries: int = 0
    _swept: bool = True  # the last turn was one of a sweep
    _done: set[tuple[int, str]] = field(default_factory=set)  # (row, what was looked at) of this turn

    @property
    def taken(self) -> float:
        """What turns take of the time of training: as measured, else what they may take; 0 where there are none."""
        if not self.firsts:
            return 0.0
        return self.measured if math.isfinite(self.measured) else self.share

    def pace(self, share: float) -> None:
        """Say what turns may take of the time of training from the next one on, within the bounds of it."""
        share = min(SHARE, max(LEAST_SHARE, share))
        if abs(share - self.share) > self.share / 4:  # neighbouring figures are noise
            self.share, self.measured = share, math.inf

    def cover(self, firsts: Sequence[int], rows_each: int) -> None:
        """Say what there is; all of it has a turn in the steps that follow."""
        self.firsts, self.rows_each = firsts, rows_each
        self.sweep()

    def sweep(self) -> None:
        """Give each module a turn in the next steps, whatever that costs."""
        self._to_sweep = max(self._to_sweep, len(self.firsts))
        self.due = 0.0 if self.firsts else math.inf

    def follow(self, full_until: int) -> None:
        """Hear until which step everything is looked at, where that is another one: if a later one, something happened."""
        if full_until > self.followed:
            self.sweep()
        self.followed = full_until

    def begin_step(self, now: float) -> None:
        """Decide who has a turn in the step that begins at `now`; to be called where `due` or `turn` says so.

        Args:
            now: of `time.perf_counter`, in seconds.
        """
        if self.turn and not self._done and self._tries < MAX_TRIES:
            self._tries += 1  # nothing of it ran, or its step was not observed
            return
        if self.turn:
            self.due = self._since + (self.spent_s / self.share if self.share > 0 else math.inf)
        num, swept = 0, self._to_sweep > 0
        if self._to_sweep:
            num = min(self._to_sweep, -(-len(self.firsts) // FIRST_STEPS))
            self._to_sweep -= num
        elif now >= self.due and self.firsts:
            num = 1
        self.turn = frozenset(self.firsts[(self._next + i) % len(self.firsts)] for i in range(num))
        if self._to_sweep:
            self.due = 0.0
        if not num:
            return
        self._next = (self._next + num) % len(self.firsts)
        if not (swept or self._swept):
            self.measured = self.spent_s / max(now - self._since, 1e-9)
        self._swept = swept
        self.phase += 1
        self._since, self.spent_s, self._tries = now, 0.0, 0
        self._done.clear()

    def is_turn(self, row: int) -> bool:
        """Whether the Linear of a row has its turn."""
        return row - row % self.rows_each in self.turn

    def is_forced(self, row: int) -> bool:
        """Whether the GEMMs of the Linear of a row are checked in each sampled step."""
        return row - row % self.rows_each in self.forced

    def took(self, row: int, what: str) -> bool:
        """Whether that look of this turn was taken."""
        return (row, what) in self._done

    def takes(self, row: int, what: str) -> bool:
        """Take the one look of this turn at an operand, or at a GEMM that reads it; False where it was taken."""
        key = row, what
        if key in self._done:
            return False
        self._done.add(key)
        return True
