"""What one step looks at, site by site.

Shapes:     row of the slab -> 0 or 1
Thread:     training, and autograd's

Amax, scales and counts are of each step, but where operands are read for that alone and it takes more than the budget.
What costs more has its turn: a part of the sites in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ByRow(Protocol):
    """Something about each row, such as bytes."""

    def __getitem__(self, row: int, /) -> int:
        """1 where it is so, else 0."""


class Each:
    """The same for all rows."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __getitem__(self, row: int, /) -> int:
        return self._value


YES, NO = Each(1), Each(0)


@dataclass(frozen=True, slots=True)
class StepSample:
    """The sites whose turn it is in one step."""

    full: ByRow  # energies, moments, depth; attention logits; shadows of GEMMs
    outputs: ByRow  # what a GEMM or a probed module puts out
    hashes: ByRow  # of weights
    maps: ByRow  # tile maps leave although nothing happened
    any_full: bool
    any_outputs: bool
    gradients: tuple[int, int] = (0, 1)  # (part, of so many) of the parameters, whose gradients are looked at
    light: ByRow = YES  # anything at all, of operands that no GEMM reads quantised


EVERYTHING = StepSample(YES, YES, YES, NO, any_full=True, any_outputs=True)
NOTHING = StepSample(NO, NO, NO, NO, any_full=False, any_outputs=False)
