"""A step of one rank after the invariants: what the roll-up over ranks needs to know of it.

Shapes:     StepView -> JudgedStep
Thread:     detect worker
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.step_view import StepView


@dataclass(frozen=True)
class JudgedStep:
    """As `step_alignment.Delivered` wants it."""

    view: StepView
    clean: bool
    poisoned: bool
    roots: tuple[Finding, ...]

    @property
    def step(self) -> int:
        """Absolute optimizer step."""
        return self.view.step

    @property
    def rank(self) -> int:
        """Who delivered it."""
        return self.view.rank

    @property
    def opens_batch(self) -> bool:
        """It is the first of its batch."""
        return self.view.index == 0

    @property
    def num_records(self) -> int:
        """Sites that it holds."""
        return len(self.view)
