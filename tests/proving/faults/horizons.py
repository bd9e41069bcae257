"""Runs that go on behind the end of what was planned for them.

Severity is how far the rate comes, against the one that was right.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from proving.faults._base import Lasting, log_uniform, onset, until
from proving.training import Expected, Training


class RateBelowZero(Lasting):
    """The rate is a line down to zero that nobody stops there, and the run is longer than was planned: each step goes uphill, a little faster
    than the one before (finetune-anything #57: a linear schedule with another number of epochs gives negative rates, and the loss
    explodes). `of_rate` is what part of the rate of the whole schedule is reached, with the other sign, after
    as many steps as `steps` says; there it stays."""

    name = "rate-below-zero"
    parts: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.004, 0.02),
        "medium": (0.02, 0.1),
        "severe": (0.1, 2.0),
    }

    def __init__(self, *, part: float, num_steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part, self.num_steps = part, num_steps
        self.usual: list[float] | None = None
        """Rates of a training that sets none itself."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RateBelowZero | None:
        step, part = onset(rng, training), log_uniform(rng, *cls.parts[severity])
        num_steps = int(rng.integers(5, 25))
        return cls(
            step=step,
            until=until(rng, step, 15, 40, stays=0.8),
            severity=severity,
            expected=Expected(("optimizer-divergence", "scalar-shift"), None, None, False),
            drawn={"of_rate": round(part, 3), "steps": num_steps},
            part=part,
            num_steps=num_steps,
        )

    def factor(self, step: int) -> float:
        """By what the right rate is multiplied."""
        if not self.active(step):
            return 1.0
        return -self.part * min(1.0, (step - self.step + 1) / self.num_steps)

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if not self.active(step):
            return
        groups = t.optimizer.param_groups
        if t.schedule is None and self.usual is None:
            self.usual = [group["lr"] for group in groups]
            self.later(lambda: self._put_back(t))
        for i, group in enumerate(groups):
            usual = group["lr"] if self.usual is None else self.usual[i]
            group["lr"] = usual * self.factor(step)

    def _put_back(self, t: Training) -> None:
        for group, usual in zip(t.optimizer.param_groups, self.usual or (), strict=False):
            group["lr"] = usual
        self.usual = None
