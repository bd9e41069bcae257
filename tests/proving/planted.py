"""Two faults and two traps of the machinery's own tests: nobody scores with them."""

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


class Broken(Trap):
    """A mistake of the proving ground."""

    name = "planted-mistake"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap:
        return cls(step=3)

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            raise ZeroDivisionError("planted")


FAULTS: dict[str, type[Fault]] = {c.name: c for c in (NanLoss, LostMoments)}
TRAPS: dict[str, type[Trap]] = {Broken.name: Broken}
