"""What observing costs, measured by itself, and how often the full statistics are taken so that it stays in its budget.

Upstream:   fp8watch.watch              Downstream: fp8watch.ops
Thread:     training
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8watch_agent.recorder import Recorder

    from .ops import Plan

CALIBRATION_STEP = 3
MAX_EVERY = 64


class Overhead:
    """Measures one step, the calibration step, in which each operand is quantised without statistics as well.

    What stays in each step (amax, counts, probes, the end of the step) counts against the budget first; full statistics
    get what it leaves.

    Args:
        every: full statistics each n-th optimizer step; raised here, never lowered.
        budget: share of a step that observing may cost, or None for whatever it costs.
        say: tells people, once.
    """

    def __init__(self, every: int, budget: float | None, say: Callable[[str], None]) -> None:
        self.every = every
        self._budget, self._say = budget, say
        self._closed_at = time.perf_counter()

    def calibrates(self, num_closed: int) -> bool:
        """Whether the step after so many closed ones is the calibration step."""
        return self._budget is not None and num_closed == CALIBRATION_STEP

    def step_closed(self, plan: Plan, recorder: Recorder, began: float) -> None:
        """Take the time of a step whose closing began at `began`; after the calibration step, judge it."""
        now = time.perf_counter()
        if plan.calibrating and self._budget is not None:
            light_s, sampling_s = max(plan.light_s, 0.0) + now - began, max(plan.sampling_s, 0.0)
            step_s = now - self._closed_at - plan.calibration_s - light_s - sampling_s
            light, sampling = light_s / max(step_s, 1e-9), sampling_s / max(step_s, 1e-9)
            left = self._budget - light
            every = max(1, min(MAX_EVERY, math.ceil(sampling / left))) if left > 0 else MAX_EVERY
            if every > self.every:
                self._say(
                    f"observing costs {light + sampling:.1%} of a step here ({light:.1%} without full statistics), the "
                    f"budget is {self._budget:.1%}: full statistics now each {every} steps, non-finite values still "
                    f"each step; overhead_budget=None keeps every={self.every}"
                )
                self.every = every
            recorder.set_gauge("overhead_ratio", light + sampling / self.every)
        self._closed_at = now
