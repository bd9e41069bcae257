"""The learning rate as training said it: its warm-up, and jumps of it. Gates the statistical tests.

Shapes:     lr per step -> warm or not, the jump that is on
Thread:     detect worker
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_server.detect.baseline import Baseline

LR_JUMP = 3.0
"""An LR this many times its usual value is a jump, not a schedule."""


class Schedule:
    """The LR of one run."""

    def __init__(self, warmup_steps: float, after_lr_warmup_steps: float) -> None:
        self._warmup_steps, self._after = warmup_steps, after_lr_warmup_steps
        self._lr = Baseline(1)
        self._first_step: int | None = None
        self._last_lr: float | None = None
        self._ramp_end: int | None = None
        self._peak: float | None = None  # largest LR that did not rise: where a warm-up ended
        self.jump_step: int | None = None
        self.last_leap: tuple[int, float, float] | None = None  # step, usual LR, LR: it stays when the jump is over

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
        leap = rising and last is not None and lr >= LR_JUMP * last and int(self._lr.count[0]) >= 4
        above = usual is not None and lr > LR_JUMP * usual and (peak is None or lr > LR_JUMP / 2 * peak)
        if above and (leap or self.jump_step is not None):  # a ramp climbs, a fault leaps
            if usual is not None and (self.jump_step is None or leap):
                self.last_leap = step, usual if self.jump_step is None or last is None else last, lr
            self.jump_step = step if self.jump_step is None else self.jump_step
            return
        self.jump_step = None
        if rising and (peak is None or lr <= LR_JUMP * peak):
            self._ramp_end = step
        elif not rising and last is not None:
            self._peak = lr if peak is None else max(peak, lr)
        if learn:
            self._lr.push(np.array([lr]))

    def resume(self) -> None:
        """A new session: its LR is held against the usual one from its first step on."""
        self.jump_step, self.last_leap = None, None
        if self.usual_lr is not None:  # what it rises from is the schedule, not the step before a warm-up
            self._last_lr = self.usual_lr

    def warm(self, step: int) -> bool:
        """Whether statistical tests may judge this step."""
        if self._first_step is None or step - self._first_step < self._warmup_steps:
            return False
        return self._ramp_end is None or step - self._ramp_end >= self._after
