"""One step after the other: what the step that begins looks at, and what happens where it ends.

Thread:     training
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.step_sample import NOTHING
from fp8watch.observer.stopwatch import FIXED
from fp8watch.session.attachment import Attachment, Cadence, Session
from fp8watch.session.event_follow import TURN_STEPS
from fp8watch.session.overhead_budget import Overhead
from fp8watch.session.site_rotation import site_rotation
from fp8watch.session.step_flush import StepFlush
from fp8watch_agent.record import StepStatus


class StepCycle:
    """Begins and closes the steps of one watch.

    Args:
        attachment: what was put on the model.
        session: whose recipe has a warm-up, and who is told.
        cadence: which steps are observed.
        overhead: how often full statistics are taken.
        flush: takes what a step leaves; None where nothing is recorded.
    """

    def __init__(
        self, attachment: Attachment, session: Session, cadence: Cadence, overhead: Overhead, flush: StepFlush | None
    ) -> None:
        plan, identity = attachment.plan, session.identity
        self._plan, self._session, self._flush, self._overhead = plan, session, flush, overhead
        self._schedule = cadence.schedule
        self._rotation = site_rotation(attachment, cadence, identity.rank, identity.world_size)
        self.step = cadence.start_step  # number of the one that runs
        self.num_closed = 0
        self._last_step = self.step - 1  # that was closed
        self._apart = 1  # its number from that of the one before
        self._is_first = True  # of those that are observed one after the other

    def renumber(self, step: int) -> None:
        """Give the step that runs another number."""
        self.step = int(step)

    def end_before(self) -> bool:
        """End the step that the next forward would end, so that it has its number; whether there was one."""
        return self._plan is not None and self._plan.step.end_before()

    def begin(self) -> None:
        """What the step that begins now looks at."""
        plan, step, flush, overhead = self._plan, self.step, self._flush, self._overhead
        if plan is None:
            return
        plan.step.outside = bool(self._schedule.windows) and not self._schedule.inside(step)
        if flush is None or plan.step.outside:
            sample = NOTHING
        else:
            if self.num_closed >= overhead.next_measured:
                self._session.guard.run("overhead", overhead.begin_step, plan, self.num_closed)
            follow = flush.events.follow
            if follow.full_until != plan.canary.followed:
                plan.canary.follow(follow.full_until)
            in_burst = step <= follow.burst_until
            sample = self._rotation.sample(
                step // self._apart,  # where training counts by tens, turns must not
                min(overhead.every, TURN_STEPS) if in_burst else overhead.every,
                1 if plan.stopwatch is not None or in_burst else overhead.light_every,
                first=self._is_first,
                full=step <= follow.full_until,
                followed=flush.events.rows if step <= follow.sites_until else (),
                common=flush.te is not None and flush.te.amax_group.known,
                # on the CPU looked at in a step that is measured: part of what full statistics cost
                outputs=step <= follow.outputs_until or (plan.stopwatch is not None and not flush.copies.late),
            )
        plan.begin_step(sample)
        if plan.stopwatch is not None:
            plan.stopwatch.add(FIXED, plan.stopwatch.began, plan.stopwatch.mark())
        if flush is not None and flush.te is not None:
            flush.te.begin_step(sample)

    def close(
        self, status: StepStatus, values: Mapping[str, Any], batch_id: str | None, *, recorded: bool, began: Any = None
    ) -> None:
        """End the step, and begin the next.

        Args:
            status: how it ended.
            values: its scalars by name, numbers or tensors.
            batch_id: name of its data.
            recorded: False while paused.
            began: mark of the stopwatch where its end began.
        """
        plan, flush = self._plan, self._flush
        if plan is None:
            return
        try:
            if flush is not None:
                flush.take(self.step, status, values, batch_id, recorded=recorded)
        finally:  # whatever failed: what this step left must not be merged into the next
            self.num_closed += 1
            self._last_step, self._apart = self.step, max(1, self.step - self._last_step)
            self.step += 1
            if plan.slab is not None:
                plan.slab.clear()
            if plan.step.warming:
                self._end_warmup(plan)
            if plan.stopwatch is not None:
                plan.stopwatch.add(FIXED, began, plan.stopwatch.mark())
            if flush is not None and self._overhead.measuring:
                self._session.guard.run("overhead", self._overhead.step_closed, plan, flush.recorder)
            self._is_first = not recorded or plan.step.outside
            self.begin()

    def _end_warmup(self, plan: ObservationPlan) -> None:
        """Let the GEMMs compute in FP8 from the step that begins now, where the recipe's warm-up is over."""
        recipe = self._session.recipe
        if self.step >= recipe.warmup_steps:
            plan.step.warming = False
            self._session.say(f"warm-up over: GEMMs compute in FP8 ({recipe.name}) from step {self.step}")
