"""A loss that jumped and was not back: said again while it is up, and a page where it stands at multiples for long.

Shapes:     loss per step -> at most one finding
Thread:     detect worker

A spike of a large training comes back over a hundred steps, one that diverges does not. Its incident lasts as long as the
loss is up: what is silent for 20 steps is resolved.
"""

from __future__ import annotations

from dataclasses import replace

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.families.jump_told import BRIEF_RATIO, _Jump, finding
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.limits import Limits

AGAIN = 3
"""Observed steps between two findings: with a dip between them still within the window of an incident."""
LONG = 50
"""Observed steps after which a loss at multiples is a page."""
MOST = 500
"""Observed steps after which its level is the one of the run."""
CALM = 3
"""Losses in a row that are back: while it goes down some dip."""


class StaysUp:
    """The loss behind a jump that was told as one that may diverge."""

    def __init__(self) -> None:
        self._jump: _Jump | None = None
        self._low = 0
        self._said = 0  # observed steps since the jump

    def begin(self, jump: _Jump) -> None:
        """It was told, and is up."""
        self._jump, self._low, self._said = jump, 0, jump.num

    def forget(self) -> None:
        """It is over, or another attempt is on."""
        self._jump = None

    def observe(self, now: CrossRankStep, loss: float, limit: Limits) -> list[Finding]:
        """Judge one step behind it."""
        jump = self._jump
        if jump is None:
            return []
        jump.num += 1
        self._low = self._low + 1 if jump.is_back(loss) else 0
        if self._low >= CALM or jump.num > MOST:
            self._jump = None
        if self._jump is None or self._low or jump.num < self._said + AGAIN:
            return []
        self._said = jump.num
        grave = jump.num >= LONG and 0 < BRIEF_RATIO * jump.usual <= loss
        return [
            replace(f, severity="critical" if grave else f.severity, extra={**f.extra, "goes_on": True})
            for f in finding(now, jump, limit, back=False)
        ]
