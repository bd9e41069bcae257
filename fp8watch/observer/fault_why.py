"""What was found of why a site is wrong: when to ask, what was answered, and what a step says of it.

Shapes:     row of the slab -> a kind and its numbers
Thread:     training, and autograd's

Nothing is asked while nothing is wrong. On a CPU a look that finds something asks at once. Elsewhere it is known only when
the step has arrived on the host: the next look at that row asks then, and the answer travels as what is logged does. A
site is asked once in ASK_AGAIN_STEPS, and MAX_SITES of them in a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fp8watch.quantize.why.case import Guess
from fp8watch_agent.fault_names import SHARE, TOLD_SHARE, WHY, Why, encode
from fp8watch_agent.record import QUANTISER_FAULTS, Measured

ASK_AGAIN_STEPS = 512
MAX_SITES = 64
LEAST_ERROR = 1e-3
"""Of a product, relative to its RMS: below it nothing is wrong."""


def _unknown(row: int) -> None:
    return None


@dataclass
class FaultWhy:
    """The faults of one attach."""

    scales_before: Callable[[int], Tensor | None] = _unknown
    """Row -> scale_inv of the step before, where it is held."""
    update_of: Callable[[int], Tensor | None] = _unknown
    """Row -> how far one update moved the weight of its module, mean over mean of magnitudes, []."""
    late: bool = False
    """The device is read late: sites are asked where they are wrong again."""
    spent_s: float = 0.0  # by asking: not of the turns in which it was asked
    found: dict[int, Why] = field(default_factory=dict)  # row -> what explains it
    _asked: dict[int, int] = field(default_factory=dict)  # row -> step
    _armed: set[int] = field(default_factory=set)
    on_the_way: dict[str, Tensor] = field(default_factory=dict)  # what the step that runs has asked
    kinds: dict[str, tuple[int, int, str, str]] = field(default_factory=dict)  # name -> row, place, kind, number

    def due(self, row: int, step: int, bad: Tensor | None) -> bool:
        """Whether to ask, in a look at a row.

        Args:
            row: of the slab.
            step: number of the step that runs, of this session.
            bad: [] bool, whether the look found something; None: nothing. It is read on a CPU alone.
        """
        asked = self._asked.get(row)
        if bad is None or (asked is not None and step - asked < ASK_AGAIN_STEPS):
            return False
        if asked is None and len(self._asked) >= MAX_SITES:
            return False
        if not (bool(bad) if bad.is_cpu else row in self._armed):
            return False
        self._asked[row] = step
        self._armed.discard(row)
        self.found.pop(row, None)
        return True

    def keep(self, row: int, guesses: Iterable[Guess]) -> None:
        """Keep the answer; of a device, until it has arrived."""
        for place, guess in enumerate(guesses):
            if guess.share.is_cpu:
                numbers = {name: float(value) for name, value in guess.numbers.items()}
                if numbers[SHARE] >= TOLD_SHARE:
                    self._found(row, guess.kind, numbers)
                    return
                continue
            for number, value in guess.numbers.items():
                if isinstance(value, float):
                    value = guess.share.new_full((), value)
                name = f"{WHY}{row}/{place}/{number}"
                self.on_the_way[name], self.kinds[name] = value, (row, place, guess.kind, number)

    def take(self) -> dict[str, Tensor]:
        """What the step that ends has asked on a device, to be copied with its scalars."""
        asked, self.on_the_way = self.on_the_way, {}
        return asked

    def arrived(self, numbers: dict[str, float]) -> None:
        """Scalars of a step have arrived: answers are taken out of them, of each site the first that holds."""
        answers: dict[tuple[int, int, str], dict[str, float]] = {}
        for name in [n for n in numbers if n.startswith(WHY)]:
            value, (row, place, kind, number) = numbers.pop(name), self.kinds.pop(name)
            answers.setdefault((row, place, kind), {})[number] = value
        for (row, _, kind), given in sorted(answers.items()):
            if given.get(SHARE, 0.0) >= TOLD_SHARE and row not in self.found:
                self._found(row, kind, given)

    def _found(self, row: int, kind: str, numbers: Mapping[str, float]) -> None:
        self.found[row] = Why(kind, {name: value for name, value in numbers.items() if np.isfinite(value)})

    def told(self, rows: npt.NDArray[np.void], names: Callable[[int], str]) -> dict[str, float]:
        """Scalars of a step: why its sites are wrong, of those that are and of which it is known.

        Args:
            rows: of the slab, of ROW.
            names: row -> "module.operand.direction".
        """
        if not self.late and not self.found:
            return {}
        wrong = _wrong(rows)
        if self.late:
            self._armed.update(row for row in wrong if row not in self._asked)
        out: dict[str, float] = {}
        for row in wrong:
            if (why := self.found.get(row)) is not None:
                out.update(encode(why, names(row)))
        return out


def _wrong(rows: npt.NDArray[np.void]) -> Sequence[Any]:
    """Rows whose codes or product were found to be wrong."""
    codes = np.zeros(len(rows), dtype=np.bool_)
    for name in QUANTISER_FAULTS:
        codes |= rows[name] > 0
    codes &= (rows["measured"] & Measured.QUANTISER) != 0
    products = ((rows["measured"] & Measured.GEMM) != 0) & ~(rows["gemm_error"] <= LEAST_ERROR)
    found: list[int] = np.flatnonzero(codes | products).tolist()
    return found
