"""Which steps have a checkpoint, and which of them hold an update of a step in which something broke.

Shapes:     slab rows [sites] of ROW, once a step -> steps
Thread:     training

A checkpoint is called by the last step whose update it holds. Weights change by updates alone, so what broke in a step
whose update was skipped is in no checkpoint, and weights that are read broken were written by the step before at the
latest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import StepStatus

MAX_KEPT = 200
"""Steps that are told; of more the oldest are forgotten."""
CHECKPOINTS_FACT = "checkpoints"
"""Fact of a session: the steps of its checkpoints, apart by spaces."""


@dataclass
class CheckpointSteps:
    """Those of one session, by what was seen on this rank."""

    saved: list[int] = field(default_factory=list)
    first_bad: int | None = None
    """The first step whose update is not to be trusted; None: none was seen."""
    newest: int | None = None
    """The newest step that has arrived on the host."""

    _left_behind: set[int] = field(default_factory=set)
    """Poisoned ones of steps that training went back over."""

    def note(self, step: int) -> bool:
        """A checkpoint was written behind this step; False where that was known."""
        self._left_behind.discard(step)  # written anew
        if step < 0 or step in self.saved:
            return False
        self.saved = [*self.saved, step][-MAX_KEPT:]
        return True

    def arrived(self, step: int, status: StepStatus, *, broken: bool, broken_weights: bool) -> None:
        """A step has arrived.

        Args:
            step: its number.
            status: how it ended.
            broken: something was not finite, or an invariant did not hold.
            broken_weights: a weight was not finite.
        """
        bad = step - 1 if broken_weights else step if broken and status == StepStatus.OK else None
        if bad is not None and (self.first_bad is None or bad < self.first_bad):
            self.first_bad = bad
        self.newest = step

    def loaded(self, next_step: int) -> None:
        """Weights are those of a checkpoint again: training goes on with this step."""
        self._left_behind.update(self.poisoned)
        if self.first_bad is not None and next_step <= self.first_bad:
            self.first_bad = None
        self.newest = None

    @property
    def last_good_step(self) -> int | None:
        """The newest step behind which the weights hold no bad update; None: no step has arrived, or none is good."""
        if self.newest is None:
            return None
        good = self.newest if self.first_bad is None else min(self.newest, self.first_bad - 1)
        return good if good >= 0 else None

    @property
    def last_good_checkpoint(self) -> int | None:
        """The newest step with a checkpoint that holds no bad update; None: there is none."""
        poisoned = set(self.poisoned)
        return max((step for step in self.saved if step not in poisoned), default=None)

    @property
    def poisoned(self) -> list[int]:
        """Steps with a checkpoint that holds a bad update."""
        bad = self.first_bad
        return [s for s in self.saved if s in self._left_behind or (bad is not None and s >= bad)]

    def fact(self) -> dict[str, str]:
        """For the session's facts."""
        return {CHECKPOINTS_FACT: " ".join(map(str, self.saved))}


def weights_broken(rows: npt.NDArray[np.void], weights: npt.NDArray[np.bool_]) -> bool:
    """Whether a weight was read that is not finite.

    Args:
        rows: [sites] of ROW.
        weights: [sites], which of them are weights.
    """
    return bool((((rows["num_nan"] > 0) | (rows["num_inf"] > 0)) & weights).any())
