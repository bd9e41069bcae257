"""What a detector over the roll-up is: it has a state, sees each step of all ranks once and in order, and names modes.

Shapes:     Context -> findings of one step
Thread:     detect worker
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import Mask


class Detector(ABC):
    """One detector of one attempt of a run. Its attributes are saved with the engine, under the name of its class."""

    modes: ClassVar[tuple[str, ...]]
    """What it can find."""
    between_samples: ClassVar[bool] = False
    """Whether it is also asked in steps without a full sample."""
    whole_samples: ClassVar[bool] = False
    """Whether such a one is given a round of turns as a whole where one ends; it may then see a record for the second time."""
    parts: ClassVar[tuple[type, ...]] = ()
    """Classes of its own that its attributes are made of."""

    @classmethod
    def make(cls, num_sites: int, limit: Limits) -> Detector:
        """One that has seen nothing."""
        return cls(num_sites)

    @abstractmethod
    def __init__(self, num_sites: int) -> None: ...

    @abstractmethod
    def grow(self, num_sites: int) -> None:
        """More sites were registered."""

    @abstractmethod
    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""

    @abstractmethod
    def frozen(self) -> Mask | None:
        """Sites whose baselines must not learn: a mask [S], or None."""

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """Values of this step broke, so that it is not judged: what must be said, or forgotten, because of it."""
        return []

    def resume(self) -> None:
        """A new session of the run goes on: what is usual stays, what was followed from step to step begins anew.

        Alarms are over; a detector that follows steps in anything else forgets that as well.
        """
        for part in vars(self).values():
            if isinstance(part, Latch):
                part.forget()

    @property
    def holds_loss(self) -> bool:
        """Whether loss and gradient norm are not ordinary now, and are not learned."""
        return False

    @property
    def holds_lr(self) -> bool:
        """Whether the learning rate of now is not to be taken for the usual one."""
        return False
