"""All that is looked at of an optimizer: what it keeps, what its updates do, whether its gradients arrive and are cleared, its rates.

Shapes:     numbers of a step by name, or [] tensors     Thread: training, around each optimizer step
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.recompute_values import only_news
from fp8watch.observer.stopwatch import FIXED
from fp8watch.session.gradient_arrival import GradientArrival
from fp8watch.session.gradients_left import GradientsLeft
from fp8watch.session.group_rates import GroupRates
from fp8watch.session.sites import SlabSite, operand_name
from fp8watch.session.standing_state import StandingState
from fp8watch.session.tensor_places import Optimizer
from fp8watch.session.update_turns import UpdateTurns
from fp8watch_agent.guard import Guard


class OptimizerLooks(StandingState):
    """Looks at the optimizers of one watch; see `StandingState`.

    Args:
        table: of the sites, whose operands may be recomputed.
    """

    def __init__(self, model: nn.Module, plan: ObservationPlan | None, table: Sequence[SlabSite] = ()) -> None:
        super().__init__(model, plan)
        self._updates, self._rates = UpdateTurns(model), GroupRates(model)
        self.left = GradientsLeft(model, Guard() if plan is None else plan.guard)
        self.arrival = None if plan is None else GradientArrival(model, plan.guard)
        self._arriving: tuple[GradientArrival, ...] = ()  # the same, in a step in which a parameter has its turn
        if plan is not None:  # it outlives a watch that was dropped
            self._hears = (weakref.WeakMethod(self.left.backward_begins),)
            plan.step.on_backward = self._hears
            plan.step.again.name_of = partial(operand_name, table)

    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer is about to step: what is not as it was left, and what is new of its last update, its gradients and rates."""
        plan, follows = self._plan, self._updates.follows(optimizer)
        if plan is None or not (follows or self.knows(optimizer)):
            return {}
        began = None if plan.stopwatch is None else plan.stopwatch.mark()
        found = super().before(optimizer)
        if follows:
            plan.guard.run("updates", self._news, optimizer, found)
        if plan.stopwatch is not None:
            plan.stopwatch.add(FIXED, began, plan.stopwatch.mark())
        return found

    def _news(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        befores = [self._rates.before, self.left.before, self._updates.before]
        for look in befores + [arriving.before for arriving in self._arriving]:
            if news := look(optimizer):
                found.update(news)

    def after(self, optimizer: Optimizer, *, looks: bool = True, parts: Sequence[Optimizer] = ()) -> None:
        """The optimizer has stepped: keep what it leaves, or what its `parts` do, where the next step `looks` at it."""
        plan = self._plan
        if plan is None:
            return
        began = None if plan.stopwatch is None else plan.stopwatch.mark()
        super().after(optimizer, looks=looks, parts=parts)
        plan.guard.run("updates", self._follow, optimizer, looks and not parts)
        if plan.stopwatch is not None:
            plan.stopwatch.add(FIXED, began, plan.stopwatch.mark())

    def _follow(self, optimizer: Optimizer, looks: bool) -> None:
        self._updates.follow(optimizer, looks=looks)
        self.left.after(optimizer, looks=looks)
        if self.arrival is not None and self._plan is not None:
            self.arrival.after(optimizer, looks=looks)
            self._arriving = (self.arrival,) if self.arrival.has_turn else ()
            arrives = (weakref.WeakMethod(look.backward_begins) for look in self._arriving)
            self._plan.step.on_backward = (*self._hears, *arrives)

    def stop(self) -> None:
        """Look no more."""
        super().stop()
        for looks in (self._updates, self._rates, self.left, self.arrival):
            if looks is not None:
                looks.stop()

    @property
    def unseen(self) -> str:
        """Why gradients that optimizers are given are held against nothing; empty where they are."""
        return "" if self.arrival is None else self.arrival.unseen

    def named(self, numbers: dict[str, float]) -> None:
        """Numbers of a step that have arrived: what changed gets its name, and where there is no news nothing stays."""
        super().named(numbers)
        self.left.named(numbers)
        self._updates.named(numbers)
        if self.arrival is not None:
            self.arrival.named(numbers)
        only_news(numbers)
