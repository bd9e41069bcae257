"""A run whose sites come in turns, fewer than half of them in a step: mode 10, recipe-mismatch, as information.

Shapes:     sites that sent anything in a step [S] -> at most one finding
Thread:     detect worker

What needs the other sites of its step beside it (outliers, noise, underflow, dying tiles, dead layers, divergence) is judged
in steps in which most sites came. Where an agent sends a part of them in each, to stay within its budget, such steps are
far apart, and slow failures are found late: that is said.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.step_view import Mask

TURNS_STEPS = 64
"""Observed steps with records, none with half of the sites, after which it is told: windows of merged records are shorter."""


class InTurns(Detector):
    """How many of the sites come in one step."""

    modes = ("recipe-mismatch",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._known = np.zeros(num_sites, dtype=np.bool_)  # sent anything, ever
        self._came = np.zeros(num_sites, dtype=np.bool_)  # since most of them came in one step
        self._num_steps, self._num_records, self._since = 0, 0, 0
        self._told = False

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = np.zeros(max(0, num_sites - len(self._known)), dtype=np.bool_)
        self._known, self._came = np.concatenate([self._known, more]), np.concatenate([self._came, more])

    def resume(self) -> None:
        """A new session may send otherwise."""
        super().resume()
        self._begin(0)
        self._told = False

    def frozen(self) -> None:
        """No baseline."""

    def observe(self, ctx: Context) -> list[Finding]:
        """Count one step."""
        seen: Mask = ctx.now.seen
        num = int(np.count_nonzero(seen))
        self._known |= seen
        known = int(np.count_nonzero(self._known))
        if 2 * num >= known:
            self._begin(ctx.now.step)
        if not num or 2 * num >= known:
            return []
        self._num_steps, self._num_records = self._num_steps + 1, self._num_records + num
        self._came |= seen
        most = 2 * int(np.count_nonzero(self._came)) >= known  # not a few that leave their bands again and again
        if self._told or self._num_steps < TURNS_STEPS or not most:
            return []
        self._told = True
        evidence = [
            Evidence("sites_per_step", round(self._num_records / self._num_steps), known, "sites", self._since),
            Evidence("steps_without_most_sites", self._num_steps, 0, "steps", self._since),
        ]
        none = np.zeros(0, dtype=np.int64)
        return [ctx.now.finding("recipe-mismatch", "info", none, evidence, "unknown", blind=True, in_turns=True)]

    def _begin(self, step: int) -> None:
        self._came[:] = False
        self._num_steps, self._num_records, self._since = 0, 0, step
