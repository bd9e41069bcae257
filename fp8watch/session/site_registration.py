"""Tells the agent of sites when their operand was first seen, and people of those that never were; again where layers were replaced or added.

Shapes:     slab rows [sites] of ROW, once a step     Thread: training
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.selection.flop_coverage import Coverage, percent
from fp8watch.session.attachment import Attachment
from fp8watch.session.silent_sites import ALARM_AFTER_STEPS, Silence
from fp8watch.session.sites import describe, operand_name
from fp8watch_agent.recorder import Recorder

Rows = npt.NDArray[np.void]


@dataclass
class SiteRegistration:
    """What the agent knows of the sites of one watch."""

    attachment: Attachment
    plan: ObservationPlan
    recorder: Recorder
    say: Callable[[str], None]
    observed: bool = False  # a step was: its rows show which sites are called
    known: npt.NDArray[np.bool_] = field(init=False)  # of each row whether its site is registered
    _registered: set[int] = field(default_factory=set)  # rows of the table
    _said_recompute: bool = False
    _silence: Silence = field(init=False)
    _asked_at: int = -1  # sites registered when it was asked last what is silent
    _asked_of: Coverage | None = None  # what was covered then
    _said_silent: bool = False
    _num_observed: int = 0  # steps, up to the one that decides what is silent for good

    def __post_init__(self) -> None:
        self._silence = Silence(self.attachment)
        self.known = np.zeros(len(self.attachment.table), dtype=np.bool_)

    def stop(self) -> None:
        """The watch ends."""
        self._silence.stop()

    def see(self, rows: Rows, *, whole: bool = True) -> None:
        """Register the sites that these rows show for the first time, and say what only running shows; of a step that was cut off,
        as by an error in its forward, not what has sent nothing."""
        plan, table, recipe = self.plan, self.attachment.table, self.plan.recipe
        if plan.recomputed.differs and not self._said_recompute:
            self._said_recompute = True
            line, facts = plan.recomputed.told(partial(operand_name, table), recipe.fingerprint())
            self.say(line)
            self.recorder.update_facts(facts)
        sites = plan.sites
        if len(self._registered) < len(sites.shapes):
            new = sorted(r for r in sites.shapes if r not in self._registered and rows["order"][r] >= 0)
            te = self.attachment.te
            self.recorder.register_sites([describe(r, table[r], int(rows["order"][r]), sites, te, recipe) for r in new])
            self._registered.update(new)
            self.known[new] = True
        if not whole:
            return
        decides = False
        if self.observed and self._num_observed < ALARM_AFTER_STEPS:
            self._num_observed += 1
            decides = self._num_observed == ALARM_AFTER_STEPS
        computed = self.attachment.computed
        if computed is not None and computed.is_news:
            computed.is_news = False
            self._tell_computed()
        covered, num = self.attachment.coverage, len(self._registered)
        known = self._silence.given.left > 0 and self._silence.step_ended()
        if self.observed and (decides or known or num != self._asked_at or covered is not self._asked_of):
            self._asked_at, self._asked_of = num, covered
            text, changed = self._silence.ask(self._registered, sites.unobserved, self._num_observed)
            if text and not self._said_silent:
                self.say(text)
            self._said_silent = True
            if changed:
                self.recorder.update_facts(changed)

    def _tell_computed(self) -> None:
        """Products with weights that the model computes: not observed, and not known before a forward ran."""
        before = self.attachment.coverage
        self.attachment.cover(before)
        covered = self.attachment.coverage
        if covered is before or covered.observed is None or before.observed is None:
            return
        self.recorder.update_facts({"not_taken": covered.facts()["not_taken"]})
        share, announced = percent(covered.observed), percent(before.observed)
        if share != announced:
            self.say(
                f"{covered.line()}; {announced} were announced, before a forward had shown that the model multiplies with weights that it computes: that is not observed"
            )
