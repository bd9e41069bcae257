"""Which weights have gradients: where some join, or are left out, the norm of all is another one.

Shapes:     looks at the operands of wgrad [S], one after the other -> how many began, or ceased, at one of them
Thread:     detect worker

A parameter that is unfrozen is in the gradient norm from then on. Only where wgrad has an operand of its own is that seen: the gradient
that enters dgrad is there for a frozen weight as well.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.step_view import GRAD_OUTPUT, Mask

NEAR = 1
"""Looks by which the norm and the gradients that make it may be apart."""
SHARE = 0.05
"""Of all weights that have had a gradient: fewer move no norm by a factor."""


class GradientsInNorm:
    """First and last look at the gradient of each weight."""

    def __init__(self, num_sites: int = 0) -> None:
        self._num_looks = 0
        self._first = np.full(num_sites, -1, dtype=np.int64)
        self._last = np.full(num_sites, -1, dtype=np.int64)
        self._turn = np.zeros(num_sites, dtype=np.int64)  # looks between the last two with it

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = max(0, num_sites - len(self._first))
        self._first = np.pad(self._first, (0, more), constant_values=-1)
        self._last = np.pad(self._last, (0, more), constant_values=-1)
        self._turn = np.pad(self._turn, (0, more))

    def look(self, now: CrossRankStep) -> None:
        """Take in one step."""
        self.grow(len(now.table))
        at, has = self._num_looks, _has_gradient(now)
        self._num_looks += 1
        self._turn = np.where(has & (self._last >= 0), at - self._last, self._turn)
        self._first = np.where(has & (self._first < 0), at, self._first)
        self._last = np.where(has, at, self._last)

    def began(self, looks_ago: int) -> tuple[int, int]:
        """(weights whose first gradient came then or since, of those that have had any); (0, 0) for few."""
        at = self._num_looks - looks_ago - NEAR
        return self._of_all(self._first >= at) if at > 0 else (0, 0)

    def ceased(self, looks_ago: int) -> tuple[int, int]:
        """(weights that had a gradient in each look up to then and none since, of those that have had any); (0, 0) for few."""
        at = self._num_looks - looks_ago - 1
        return self._of_all((self._turn == 1) & (self._last >= at - NEAR) & (self._last <= at))

    def _of_all(self, which: Mask) -> tuple[int, int]:
        num, known = int(np.count_nonzero(which)), int(np.count_nonzero(self._first >= 0))
        return (num, known) if num > SHARE * known else (0, 0)


def _has_gradient(now: CrossRankStep) -> Mask:
    of_weights = (now.table.role == GRAD_OUTPUT) & ~now.table.rowwise
    return np.asarray(of_weights & ~np.isnan(now.log2_amax))
