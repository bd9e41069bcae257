"""Which optimizers step behind each other of the same backward: AdamW behind Muon, each over its own part.

Thread:     training

Either may sit a step out, so where one has stepped and the others have not, the step ends where the next forward begins. Two
that step each behind a backward of its own (a GAN's) are no companions: one step of the run is one of each. Companions that
part later have steps of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

Optimizer = torch.optim.Optimizer

RATE_STAYS = 32
"""Learning rates of companions that are passed over since the one whose rate is told has stepped; then it is another's."""


class Companions:
    """Of one watch."""

    def __init__(self) -> None:
        self._them: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._order: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # in which they were met
        self._passed_over = 0

    def meet(self, optimizer: Optimizer) -> None:
        """It steps for the first time."""
        self._order[optimizer] = len(self._order)

    def all_of(self, optimizers: Collection[Optimizer]) -> bool:
        """Whether each is a companion of another."""
        return all(o in self._them for o in optimizers)

    def follow(
        self, optimizer: Optimizer, stepped: Collection[Optimizer], last: Optimizer | None, *, ran: bool, same: bool
    ) -> None:
        """Learn from an optimizer that has stepped.

        Args:
            optimizer: it.
            stepped: before it, in the step that runs.
            last: that ended a step.
            ran: watched modules ran a backward since the last end.
            same: and none since the one before it stepped.
        """
        others = [o for o in stepped if o is not optimizer]
        if not ran and last is not None and last is not optimizer:
            self._them.update((optimizer, last))
        elif ran and others and same:
            self._them.update((optimizer, *others))

    def tells_rate(self, optimizer: Optimizer) -> bool:
        """Whether its learning rate is that of the run: of several companions always that of the one that was met first, while
        it steps."""
        first = min(self._them, key=lambda o: self._order.get(o, 0)) if optimizer in self._them else optimizer
        if first is optimizer:
            self._passed_over = 0
            return True
        self._passed_over += 1
        return self._passed_over > RATE_STAYS
