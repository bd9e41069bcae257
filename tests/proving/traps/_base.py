"""What healthy events share: a moment, or a span of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from proving.training import Training, Trap


def moment(rng: np.random.Generator, t: Training) -> int:
    """A step in the window in which faults begin."""
    return int(rng.integers(t.onset[0], t.onset[1] + 1))


class Simple(Trap):
    """Drawn with a step alone, and everywhere. `at` happens before that step."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return cls(step=moment(rng, training))

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            self.at(t)

    def at(self, t: Training) -> None:
        """What happens."""


class Spanned(Trap):
    """On from `step` to `until`."""

    shortest, longest = 10, 40

    def __init__(self, *, step: int, until: int, drawn: dict[str, Any] | None = None) -> None:
        super().__init__(step=step, drawn={"until": until, **(drawn or {})})
        self.until = until

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        step = moment(rng, training)
        return cls(step=step, until=step + int(rng.integers(cls.shortest, cls.longest + 1)))

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            self.begin(t)
        elif step == self.until:
            self.end(t)

    def begin(self, t: Training) -> None:
        """Before the first step of it."""

    def end(self, t: Training) -> None:
        """Before the first step after it."""
