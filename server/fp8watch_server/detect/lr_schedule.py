"""The learning rate as training said it: its warm-up, and jumps of it. Gates the statistical tests.

Shapes:     lr per step -> warm or not, the jump that is on
Thread:     detect worker
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_server.detect.baseline import Baseline

LR_JUMP = 3.0
"""An LR this many times its usual value is a jump, not a schedule; a climb is one so far above every LR that it ever stood at."""
AFTER_RISE_STEPS = 20
"""Steps after the last rise of an LR that is out of its range, in which what begins to grow follows it."""


class Schedule:
    """The LR of one run."""

    fallen_step: int | None = None
    """In which it fell at once, to a third and less. A state that was saved before has none."""

    def __init__(self, warmup_steps: float, after_lr_warmup_steps: float) -> None:
        self._warmup_steps, self._after = warmup_steps, after_lr_warmup_steps
        self._lr = Baseline(1)
        self._first_step: int | None = None
        self._last_lr: float | None = None
        self._ramp_end: int | None = None
        self._peak: float | None = None  # largest LR that did not rise: where a warm-up ended
        self._rise: int | None = None  # step in which the rise that is on passed the largest LR that it stood at
        self._climbs = False  # the jump that is on is a climb
        self.jump_step: int | None = None
        self.last_leap: tuple[int, float, float] | None = (
            None  # step, LR of the step before, LR: it stays when the jump is over
        )
        self.risen_step: int | None = None  # in which the LR leaped, or rose last where it climbs

    def adopt(self, fresh: Schedule) -> None:
        """Read back from a state, perhaps of an earlier version: the limits are those of `fresh`, and what it lacks begins as in it."""
        self.__dict__.update({**vars(fresh), **vars(self)})
        self._warmup_steps, self._after = fresh._warmup_steps, fresh._after

    @property
    def usual_lr(self) -> float | None:
        """Median LR of the clean steps, None before one was seen."""
        usual = float(self._lr.median()[0])
        return float(f"{usual:.6g}") if math.isfinite(usual) else None

    def observe(self, step: int, lr: float | None, *, learn: bool) -> None:
        """Take one step in.

        Args:
            learn: no alarm is on; otherwise the usual LR stays what it was.
        """
        if self._first_step is None:
            self._first_step = step
        if lr is None or not math.isfinite(lr) or lr <= 0:
            return
        last, usual, peak = self._last_lr, self.usual_lr, self._peak
        self._last_lr = lr
        rising = last is not None and lr > last
        if last is not None and lr * LR_JUMP <= last:
            self.fallen_step = step
        leap = rising and last is not None and lr >= LR_JUMP * last and int(self._lr.count[0]) >= 4
        if self._climbed(step, lr, rising=rising, leap=leap):
            return
        above = usual is not None and lr > LR_JUMP * usual and (peak is None or lr > LR_JUMP / 2 * peak)
        if above and (leap or self.jump_step is not None):  # a ramp climbs, a fault leaps
            if last is not None and (self.jump_step is None or leap):
                self.last_leap = step, float(f"{last:.6g}"), lr
                self.risen_step = step
            self.jump_step = step if self.jump_step is None else self.jump_step
            return
        self.jump_step = None
        if rising and (peak is None or lr <= LR_JUMP * peak):
            self._ramp_end = step
        elif not rising and last is not None:
            self._peak = lr if peak is None else max(peak, lr)
        if learn:
            self._lr.push(np.array([lr]))

    def _climbed(self, step: int, lr: float, *, rising: bool, leap: bool) -> bool:
        """Whether the LR has climbed, in small steps, far above each that it ever stood at. A warm-up has none to be above."""
        peak = self._peak
        if peak is None or lr <= peak:
            self._rise, self._climbs = None, False
            return False
        if not self._climbs:
            if leap or not rising or self.jump_step is not None:
                self._rise = None
                return False
            self._rise = step if self._rise is None else self._rise
            if lr <= LR_JUMP * peak:
                return False
            self._climbs = True
        self.jump_step = began = step if self._rise is None else self._rise
        if rising:
            self.last_leap, self.risen_step = (began, peak, lr), step
        return True

    @property
    def lr_before(self) -> float | None:
        """LR before the jump that is on, else the usual one."""
        if self._climbs:
            return self._peak
        return self.usual_lr if self.jump_step is None or self.last_leap is None else self.last_leap[1]

    def risen(self, step: int, first: int | None = None) -> tuple[int, float, float] | None:
        """The leap or climb that what began at `step` may follow: (its first step, LR before, LR).

        Args:
            first: first step in which it may have begun, where it was seen later.
        """
        first = step if first is None else first
        near = self.risen_step is not None and first <= self.risen_step + AFTER_RISE_STEPS
        return self.last_leap if near and self.last_leap is not None and self.last_leap[0] <= step else None

    def resume(self) -> None:
        """A new session: its LR is held against the usual one from its first step on. Within the first warm-up none is usual."""
        self.jump_step, self.last_leap, self.risen_step, self.fallen_step = None, None, None, None
        self._rise, self._climbs = None, False
        # What it rises from is the schedule, not the step before a warm-up.
        self._last_lr = self.usual_lr if self._peak is not None else None

    def warm(self, step: int) -> bool:
        """Whether statistical tests may judge this step."""
        if self._first_step is None or step - self._first_step < self._warmup_steps:
            return False
        return self._climbs or self._ramp_end is None or step - self._ramp_end >= self._after
