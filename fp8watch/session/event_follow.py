"""What follows an event: for some steps after something broke or jumped everything is looked at, whatever `every` says.

Shapes:     slab rows [sites] of ROW, and the scalars of a step -> the sites whose tile maps follow
Thread:     training

A jump begins a burst: tile maps and full statistics of the sites that told of it for `BURST_STEPS` steps, full statistics of
all sites in the first `WHOLE_STEPS` of them, of each once in `TURN_STEPS` in the others. A slight jump, of few sites that are
not far outside of their bands, is followed at these sites alone: sound runs have one in some hundred steps. Bursts are
rationed, so that a restless run stays near its budget.
What breaks (non-finite values, a broken invariant) has full statistics in all steps of its burst, a ration of its own, and
needs no distance; beyond that only outputs are looked at. The host learns of a step on a GPU one or two steps later, so the burst
begins that much later; tile maps of the jump's own step are held until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch.observer.nonfinite_checks import ALERT_STEPS
from fp8watch.session.jumps import Floats, RowJumps, Rows, ScalarJumps, most_telling
from fp8watch.session.row_glance import Glance

BURST_STEPS = 16
WHOLE_STEPS = 4  # at the beginning of a burst that a jump began: all sites in each
TURN_STEPS = 4  # behind them: each site once in so many
APART_STEPS = 64  # from the beginning of one burst to that of the next, for jumps
MAX_BURSTS = 4  # that a quiet run has saved up
REFILL_STEPS = 256  # for one more of them
MAX_FOLLOWED = 8  # sites whose tile maps follow a jump
SLIGHT = 2.0  # times what a band allows: a jump of no more than this, and of no more sites, is slight


class Follow:
    """For which steps everything is looked at: after what broke, and after a jump."""

    def __init__(self) -> None:
        self.outputs_until = -1  # the last step in which every output and gradient is looked at
        self.full_until = -1  # the last step with full statistics of all sites
        self.burst_until = -1  # the last step of the burst
        self.sites_until = -1  # the last step in which the sites that told of a jump are looked at
        self._begun = self._slight_begun = -APART_STEPS
        self._saved = self._saved_for_breaks = self._saved_for_slight = float(MAX_BURSTS)
        self._seen = 0

    def broke(self, step: int, newest: int, *, fresh: bool) -> None:
        """Something is broken in `step`.

        Args:
            step: where it is.
            newest: the step that was begun last.
            fresh: it was sound in the step before. What stays broken is looked at by its outputs only.
        """
        self.reached(newest)
        self.outputs_until = max(self.outputs_until, step + ALERT_STEPS)
        if fresh and self._saved_for_breaks >= 1:
            self._saved_for_breaks -= 1
            self._begin(newest, BURST_STEPS)

    def jumped(self, newest: int, *, slight: bool = False) -> bool:
        """Something jumped. True where a burst begins; False where one is on, or was just now, or none is saved up.

        Args:
            newest: the step that was begun last.
            slight: only the sites that jumped are looked at; what jumps further meanwhile has its burst all the same.
        """
        self.reached(newest)
        if slight:
            if newest - max(self._begun, self._slight_begun) < APART_STEPS or self._saved_for_slight < 1:
                return False
            self._saved_for_slight -= 1
            self._slight_begun, self.sites_until = newest, newest + BURST_STEPS
            return True
        if newest - self._begun < APART_STEPS or self._saved < 1:
            return False
        self._saved -= 1
        self._begin(newest, WHOLE_STEPS)
        return True

    def _begin(self, newest: int, whole: int) -> None:
        self._begun = newest
        self.full_until = max(self.full_until, newest + whole)
        self.burst_until = self.sites_until = newest + BURST_STEPS
        self.outputs_until = max(self.outputs_until, self.burst_until)

    def reached(self, newest: int) -> None:
        """Training is at this step: what is saved up grows, and where training went back nothing is on any more."""
        if newest < self._seen:
            self._begun = self._slight_begun = -APART_STEPS
            self.full_until = self.burst_until = self.sites_until = self.outputs_until = -1
        more = max(0, newest - self._seen) / REFILL_STEPS
        self._saved = min(MAX_BURSTS, self._saved + more)
        self._saved_for_breaks = min(MAX_BURSTS, self._saved_for_breaks + more)
        self._saved_for_slight = min(MAX_BURSTS, self._saved_for_slight + more)
        self._seen = newest


class Followed(NamedTuple):
    """Sites whose tile maps follow a jump."""

    rows: list[int]
    begun: bool  # by this step: then what led up to it goes as well
    jumped: bool  # in this step: what was recorded does not wait for more steps


NOTHING_FOLLOWED = Followed([], False, False)


class EventFollow:
    """Looks into each step that has arrived, and says what the steps after it look at.

    Args:
        num_rows: of the slab.
    """

    def __init__(self, num_rows: int) -> None:
        self.follow = Follow()
        self._row_jumps, self._scalar_jumps = RowJumps(num_rows), ScalarJumps()
        self.is_broken = False  # in the step that was looked at last
        self._broken_until = -1  # the last step of the burst because of that
        self._score: Floats | None = None  # [sites], of the step that was looked at last; None: something broke
        self.rows: list[int] = []
        """Sites that told of the jump that is followed."""

    def look(self, step: int, newest: int, rows: Rows, seen: Glance, numbers: Mapping[str, float]) -> Followed:
        """Let full statistics follow what broke or jumped.

        Args:
            step: that has arrived.
            newest: the step that ended last.
            rows: [sites] of ROW.
            seen: of these rows.
            numbers: scalars of the step by name.
        """
        follow = self.follow
        is_broken = seen.any_broken or seen.is_wrong
        is_broken |= not (math.isfinite(numbers.get("loss", 0.0)) and math.isfinite(numbers.get("grad_norm", 0.0)))
        follow.reached(newest)
        if is_broken:
            follow.broke(step, newest, fresh=not self.is_broken)
            self._broken_until = follow.burst_until
        self.is_broken = is_broken
        score = self._row_jumps.see(rows, seen.broken)
        scalar, furthest = self._scalar_jumps.see(numbers), float(score.max(initial=0.0))
        num = int(np.count_nonzero(score > 1)) if furthest > 1 else 0
        jumped = scalar or num > 0
        slight = not scalar and num <= MAX_FOLLOWED and furthest <= SLIGHT
        begun = jumped and not is_broken and follow.jumped(newest, slight=slight)
        if begun:
            self.rows = most_telling(score, rows["order"], num if slight else MAX_FOLLOWED)
        elif step > follow.sites_until:
            self.rows = []
        self._score = None if is_broken or step <= self._broken_until else score
        return Followed(self.rows, begun, jumped)

    def calm(self) -> npt.NDArray[np.bool_] | None:
        """Sites that were inside a band that is known in the step that was looked at last; None where something is broken. [sites]"""
        if self._score is None:
            return None
        calm: npt.NDArray[np.bool_] = self._row_jumps.known & (self._score <= 1)
        calm[self.rows] = False
        return calm
