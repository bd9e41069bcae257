"""What observing costs, measured by itself, and how often operands are looked at so that it stays in its budget.

Thread:     training
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fp8watch.observer.canary import Canary
from fp8watch.observer.stopwatch import EXTRA, FIXED, LIGHT, SAMPLING, STEP, Event, Stopwatch, events_of

if TYPE_CHECKING:
    from fp8watch.observer.observation_plan import ObservationPlan
    from fp8watch_agent.recorder import Recorder

FIRST_STEPS = (3, 5, 7, 9, 11)
"""Steps that are measured before anything is decided; one alone is at the mercy of what else the machine does."""

SETTLED_STEPS = (24, 36, 48, 60, 72)
"""Measured next: early steps cost more, by a quarter on one machine, and what they say would count for thousands."""

AGAIN_STEPS = 100
"""After these at first each so many steps one is measured, and the last `len(FIRST_STEPS)` count. In a measured step
operands are quantised several times: where that takes much, the next is further away."""

EARLY_STEPS = FIRST_STEPS + SETTLED_STEPS

MEASURING_SHARE = 0.05
"""Of the budget: what measuring may take."""

MAX_EVERY = 64
MAX_LIGHT_EVERY = 16
"""Fewer steps than an incident stays open without being seen again."""

TURNS = 0.3
"""Of what operands and the rest leave of the budget: what the canary's turns may take."""
LEAST = 0.25
"""Of the budget: what full statistics may cost however little is left of it."""
OVER = 0.5
"""Of what is looked at in each step beyond the budget: what they may cost where that is more."""

NOTABLE = 1.5
"""Times the budget: what costs more than this is said even where rarer statistics would not help."""

MAX_WAITING = 4
"""Measured steps that the device has not passed yet; what is older is let go."""


class Cost(NamedTuple):
    """Of one step, as shares of what it takes without being observed."""

    light: float  # for the operands of a step
    sampling: float  # full statistics of all sites, on top
    measuring: float = 0.0  # of a measured step, on top
    step_s: float = 0.0  # what it takes without being observed, in seconds
    fixed: float = 0.0  # in each step, whatever is looked at
    turns: float = 0.0  # what the canary's turns may take


def choose_light_every(cost: Cost, budget: float) -> int:
    """How often an operand is looked at at all, where no GEMM reads it quantised: a power of two, so that this takes no
    more than half of what the budget leaves, full statistics in each step included or else come on top of it."""
    left = budget - cost.fixed - cost.turns
    if left > 0 and cost.light + cost.sampling <= left:
        return 1
    for every in (1, 2, 4, 8):
        if cost.light / every <= left / 2:
            return every
    return MAX_LIGHT_EVERY


def choose_turns(cost: Cost, budget: float, light_every: int = 1) -> float:
    """What the canary's turns may take: they and full statistics share what each step leaves of the budget."""
    return TURNS * (budget - cost.fixed - cost.light / light_every)


def choose_every(cost: Cost, budget: float, light_every: int = 1) -> int:
    """How often full statistics fit into what each step leaves of the budget. Where that is little or nothing, they have a
    share of their own: a quarter of the budget, or half of what each step takes beyond it."""
    each = cost.fixed + cost.turns + cost.light / light_every
    share = max(budget - each, LEAST * budget, OVER * (each - budget), 1e-9)
    return min(MAX_EVERY, max(1, math.ceil(cost.sampling / share - 1e-9)))


class Overhead:
    """Measures some steps and chooses `every` by the median of the last few.

    In a measured step everything that observing adds is timed: in FP8 recipes the quantisation is part of training, so
    operands are quantised without statistics as well and the difference counts; where nothing is quantised for a GEMM
    all of it counts.

    Args:
        every: full statistics of each site once in n optimizer steps, as asked for; never more often than that.
        budget: share of a step that observing may cost, or None to measure nothing and change nothing.
        say: tells people, once.
        in_turns: operands are read for their statistics alone, and need not be in each step.
    """

    def __init__(self, every: int, budget: float | None, say: Callable[[str], None], *, in_turns: bool = False) -> None:
        self.every = self._asked = every
        self.light_every, self._in_turns = 1, in_turns
        self.next_measured: float = FIRST_STEPS[0] if budget is not None else math.inf
        """So many steps are closed before the next one that is measured begins."""
        self.measuring = False  # a measured step is running, or is on its way from the device
        self._budget, self._say, self._said = budget, say, False
        self._costs: deque[Cost] = deque(maxlen=len(FIRST_STEPS))
        self._waiting: deque[Stopwatch] = deque()
        self._num_begun = 0  # measurements
        self._apart = AGAIN_STEPS  # steps from one measured step to the next
        self._event: Callable[[], Event] | None = None
        self._measurable: bool | None = None
        self._canary = Canary()

    @property
    def ratio(self) -> float | None:
        """What observing costs as it is set now, as a share of a step, by the last measured steps; None where that has
        not been measured."""
        if not self._costs:
            return None
        cost = self._median()
        light = cost.light / self.light_every
        return cost.fixed + self._canary.taken + light + cost.sampling / self.every + cost.measuring / self._apart

    def begin_step(self, plan: ObservationPlan, num_closed: int) -> None:
        """Time the step that begins after so many closed ones, if its turn has come and it is observed."""
        plan.stopwatch = None
        if self._budget is None or num_closed < self.next_measured or plan.slab is None or not plan.observing:
            return
        if self._measurable is None:
            try:
                self._event, self._measurable = events_of(plan.slab.device), True
            except NotImplementedError:
                self._measurable = False
        if not self._measurable:
            self.next_measured = math.inf
            return
        self._num_begun += 1
        if self._num_begun < len(EARLY_STEPS):
            self.next_measured = EARLY_STEPS[self._num_begun]
        else:
            self.next_measured = num_closed + self._next_apart()
        self.measuring = True
        plan.stopwatch = Stopwatch(self._event)

    def _next_apart(self) -> int:
        """Further away from time to time, until measuring takes no more than its share of the budget."""
        if self._num_begun > len(EARLY_STEPS) and self._costs and self._budget is not None:
            needed = math.ceil(self._median().measuring / max(MEASURING_SHARE * self._budget, 1e-9))
            self._apart = max(AGAIN_STEPS, min(2 * self._apart, needed))
        return self._apart

    def step_closed(self, plan: ObservationPlan, recorder: Recorder) -> None:
        """The step is over, its end included. Judge what has been measured, once it can be read."""
        stopwatch, plan.stopwatch = plan.stopwatch, None
        if stopwatch is not None and plan.observing and not stopwatch.empty:
            stopwatch.stop()
            self._waiting.append(stopwatch)
        while self._waiting:
            seconds = self._waiting[0].read()
            if seconds is None and not self._waiting[0].failed() and len(self._waiting) <= MAX_WAITING:
                return
            self._waiting.popleft()
            if seconds is not None:
                self._canary = plan.canary
                self._judge(seconds, recorder)
        self.measuring = False

    def _judge(self, seconds: dict[str, float], recorder: Recorder) -> None:
        light, fixed, sampling = (max(seconds[name], 0.0) for name in (LIGHT, FIXED, SAMPLING))
        bare = max(seconds[STEP] - light - fixed - sampling - seconds[EXTRA], 1e-9)
        extra = max(seconds[EXTRA], 0.0)
        self._costs.append(Cost(light / bare, sampling / bare, extra / bare, bare, fixed / bare))
        if self._budget is not None and len(self._costs) == self._costs.maxlen:
            cost, canary = self._median(), self._canary
            if self._in_turns:
                self.light_every = choose_light_every(cost, self._budget)
            canary.pace(choose_turns(cost, self._budget, self.light_every))
            cost = cost._replace(turns=canary.share if canary.firsts else 0.0)
            every = max(self._asked, choose_every(cost, self._budget, self.light_every))
            every = self.light_every * math.ceil(every / self.light_every)
            if abs(every - self.every) > self.every // 4:  # neighbouring figures are noise
                self.every = every
            self._tell(self._budget)
        if self.ratio is not None:
            recorder.set_gauge("overhead_ratio", self.ratio)

    def _tell(self, budget: float) -> None:
        """Say once what it costs, where that is more than the budget or full statistics have become rarer."""
        ratio = self.ratio
        rarer = self.every > self._asked or self.light_every > 1
        if self._said or ratio is None or (not rarer and ratio <= NOTABLE * budget):
            return
        self._said = True
        step_s = self._median().step_s
        often = "in each step"
        if self.light_every > 1:
            often = f"once in {max(self.every, self.light_every)} steps, and it is looked at once in {self.light_every}"
        elif self.every > 1:
            often = f"once in {self.every} steps, and what breaks is seen in each"
        text = f"observing adds at least {_ms(ratio * step_s)} to a step of {_ms(step_s)} ({ratio:.1%}); full statistics of a site come {often}"
        if ratio > NOTABLE * budget:
            text += f"; sites=, windows= or a larger every= bring it nearer to overhead_budget={budget:g}"
        self._say(text)

    def _median(self) -> Cost:
        return Cost(*(statistics.median(part) for part in zip(*self._costs, strict=True)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
