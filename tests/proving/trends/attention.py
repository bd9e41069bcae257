"""Attention logits that climb towards 100, where one is warned of them; BF16 would do the same."""

from __future__ import annotations

import numpy as np
import torch
from proving.faults._base import one_of, trained
from proving.faults.attention import _pairs
from proving.training import Training
from proving.trends._base import Trend

LIMIT = 100.0
SHORT = (35.0, 75.0)
"""Where those level off that do not arrive."""
FLOOR = 2.0
"""A logit that is smaller at the onset is taken for this: nobody plans a trend that grows by thousands."""


class LogitsClimb(Trend):
    """Weights of q and k grow with each update, so that their largest logit would follow the path; training goes on against it."""

    name = "logits-climb"

    def __init__(self, *, modules: tuple[str, ...], goal: float, bends: bool, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.modules, self.goal, self.bends = modules, goal, bends
        self.first: float | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LogitsClimb | None:
        pairs = [p for p in _pairs(training) if len(trained(training, p)) == len(p)]
        if not pairs:
            return None
        modules, times = one_of(rng, pairs), cls.times(rng)
        bends = severity == "levels-off"
        goal = float(rng.uniform(*SHORT)) if bends else LIMIT
        return cls(
            **times, modules=modules, goal=goal, bends=bends, drawn={"module": modules[0], "goal": round(goal, 1)}
        )

    def level(self, step: int) -> float:
        """The planned logit."""
        assert self.first is not None
        done = min(self.done(step), 1.0) if self.bends else self.done(step)
        return self.first + (self.goal - self.first) * done

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if step < self.step:
            return
        if self.first is None:
            self.first = min(max(float(t.notes.get("logit", FLOOR)), FLOOR), 0.8 * self.goal)
        rate = (self.level(step + 1) / self.level(step)) ** 0.5
        for name in self.modules:
            linear = t.model.get_submodule(name)
            rows = linear.weight.shape[0] * 2 // 3 if len(self.modules) == 1 else linear.weight.shape[0]
            linear.weight[:rows] *= rate
            if linear.bias is not None:
                linear.bias[:rows] *= rate
