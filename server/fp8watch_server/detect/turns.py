"""Steps in which less than half of the sites come, because these are looked at in turn: a round of them is one sample.

Shapes:     steps of some sites each -> one step of all
Thread:     detect worker

Where nothing is quantised for a GEMM an operand may be looked at once in 16 steps (fp8watch.session.overhead_budget), and
no step is a sample of the model. What follows sites from sample to sample is asked once a round, with the newest records
of each of them.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.cross_rank_step import CrossRankStep

LONGEST_ROUND = 16
"""Steps in which each site has its turn (fp8watch.session.overhead_budget.MAX_LIGHT_EVERY)."""
KEPT_STEPS = 64
"""What is older belongs to no round: whatever was to come has not."""
NEARLY_ALL = 7 / 8
"""Of the sites that came in the last samples: some come in none of a round, such as those of an expert without tokens."""


class Turns:
    """The round that is not over. Nothing of it is in a state: after a restart of the collector a round begins anew."""

    def __init__(self) -> None:
        self._steps: list[CrossRankStep] = []
        self._most = 0  # records of the fullest sample

    def forget(self) -> None:
        """What came so far says nothing of what comes: values broke, or training went back."""
        self._steps = []

    def sample(self, now: CrossRankStep, num_known: int) -> CrossRankStep | None:
        """The sample that ends with a step: the step itself where most sites came in it, a round that it completes, or None.

        Args:
            now: the step.
            num_known: sites of which there were records in this attempt.
        """
        if _is_of_most(now, num_known):
            self._steps, self._most = [], max(_num_records(now), self._most // 2)
            return now
        if not _num_records(now):
            return None
        self._steps = [step for step in self._steps if now.step - KEPT_STEPS < step.step < now.step]
        whole = CrossRankStep(now.views, now.table, self._steps)
        took_long = bool(self._steps) and now.step - self._steps[0].step >= LONGEST_ROUND - 1
        all_came = 0 < NEARLY_ALL * self._most <= _num_records(whole)
        if (took_long or all_came) and _is_of_most(whole, num_known):
            self._steps = []
            return whole
        self._steps.append(now)
        return None


def _is_of_most(step: CrossRankStep, num_known: int) -> bool:
    return int(np.count_nonzero(~np.isnan(step.log2_amax))) * 2 >= max(num_known, 1)


def _num_records(step: CrossRankStep) -> int:
    return sum(map(len, step.sources))
