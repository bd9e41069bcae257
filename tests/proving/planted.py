"""Faults and a trap of the machinery's own tests: nobody scores with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from proving.training import Expected, Fault, Training, Trap
from torch import Tensor


class NanLoss(Fault):
    """The loss of one step is NaN."""

    name, generator = "planted-nan", "planted"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Fault:
        step = int(rng.integers(*training.onset))
        return cls(step=step, until=step + 1, severity=severity, expected=Expected(("nan-in-loss",), fp8=False))

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        return loss * float("nan") if self.active(step) else loss


class LostMoments(Fault):
    """The optimizer's state is lost at a resume."""

    name, generator, resumes = "planted-lost-moments", "planted", True

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Fault:
        return cls(step=int(rng.integers(*training.onset)), severity=severity, expected=Expected(("recipe-mismatch",)))

    def before_resume(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"optimizer": state["optimizer"] | {"state": {}}}


class FastResume(Fault):
    """In the first three steps behind a resume the learning rate is thirty times that of the schedule."""

    name, generator, resumes = "planted-fast-resume", "planted", True
    times, steps = 30.0, 3

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Fault | None:
        if training.schedule is None:  # which sets the rate anew in each step
            return None
        step = int(rng.integers(*training.onset))
        expected = Expected(("optimizer-divergence",), fp8=False)
        return cls(step=step, until=step + cls.steps, severity=severity, expected=expected)

    def before_step(self, t: Training, step: int) -> None:
        if self.active(step):
            for group in t.optimizer.param_groups:
                group["lr"] *= self.times


class Broken(Trap):
    """A mistake of the proving ground."""

    name = "planted-mistake"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap:
        return cls(step=3)

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            raise ZeroDivisionError("planted")


FAULTS: dict[str, type[Fault]] = {c.name: c for c in (NanLoss, LostMoments, FastResume)}
TRAPS: dict[str, type[Trap]] = {Broken.name: Broken}
