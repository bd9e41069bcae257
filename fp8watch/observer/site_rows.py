"""Rows of the slab by site: which rows an operand has, which quantisers fill them, and which of them are observed.

Shapes:     (Linear, operand, directions) -> rows of the slab     Thread: training, and autograd's

Nothing here changes from call to call, so what a call needs is looked up once and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp8watch.observer.foreign import Foreign
from fp8watch.observer.step_sample import NO, YES, ByRow, StepSample
from fp8watch.quantize.site_quantizer import (
    MxQuantizer,
    Nvfp4Quantizer,
    RowwiseQuantizer,
    SiteQuantizer,
    can_merge,
    places,
    read_together,
)
from fp8watch.recipe import OPERANDS, Recipe

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2


def rows_of(recipe: Recipe) -> dict[tuple[int, bool], int]:
    """Rows of a Linear in the slab, from its first: (operand, columnwise) -> row. See `site_quantizer.places`."""
    return {(OPERANDS.index(p.operand), p.direction == "columnwise"): row for row, p in enumerate(places(recipe))}


@dataclass(frozen=True, slots=True)
class OperandRows:
    """One operand of one Linear, in the directions that a call asks for."""

    rows: tuple[int, ...]
    quantizers: tuple[SiteQuantizer, ...]  # one a row
    together: bool  # both directions from one read
    merges: bool  # the call that measures writes into the slab as well
    kind: int | None  # equal where the same values give the same statistics; None: they depend on more than that
    stateful: bool  # a scale with a history, which must see each pass
    observed: bool  # any of the rows
    looked_at: tuple[int, ...]  # rows to measure where no GEMM reads the operand quantised
    first: int  # the operand's first row: how a forward computes is noted under it
    asks_column: int | None  # columnwise row of a forward operand that this call asks for
    leaves_column: int | None  # ... that it leaves out, and that a recomputation may ask for


@dataclass
class SiteRows:
    """The sites of one attach.

    Args:
        quantizers: one a row, of all Linears.
        rows: (operand, columnwise) -> row, from a Linear's first.
        unobserved: rows that attach was told to leave alone.
    """

    quantizers: Sequence[SiteQuantizer]
    rows: dict[tuple[int, bool], int]
    unobserved: frozenset[int] = frozenset()
    foreign: dict[int, Foreign] = field(default_factory=dict)
    """First row of a Linear that computes in FP8 by a forward of its own -> what is known of it."""
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> shape of the operand at its first call
    known: dict[tuple[int, int, bool, bool], OperandRows] = field(default_factory=dict)
    """What `asked` has given before, by its arguments."""
    _kinds: dict[tuple[object, ...], int] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], OperandRows] = field(default_factory=dict)
    _never: npt.NDArray[np.bool_] | None = None  # of each row whether none of the Linear that begins there is observed

    def __post_init__(self) -> None:
        # a copy that serves both directions has one row, under the direction that is read first
        self._alias = {
            (operand, not columnwise): row
            for (operand, columnwise), row in self.rows.items()
            if row < len(self.quantizers) and self.quantizers[row].spec.shared
        }

    def find(self, first: int, operand: int, columnwise: bool) -> int | None:
        """Row of a site; of an operand that one quantisation serves in both directions, its only one. None: no GEMM reads
        the operand quantised in that direction."""
        at = self.rows.get((operand, columnwise), self._alias.get((operand, columnwise)))
        return None if at is None else first + at

    def row(self, first: int, operand: int, columnwise: bool) -> int:
        """Row of a site that is there."""
        found = self.find(first, operand, columnwise)
        assert found is not None
        return found

    def asked(self, first: int, operand: int, rowwise: bool, columnwise: bool) -> OperandRows:
        """What a call needs that asks for these directions of an operand of the Linear with this first row."""
        key = first, operand, rowwise, columnwise
        found = self.known.get(key)
        if found is None:
            wanted = [c for c, asks in ((False, rowwise), (True, columnwise)) if asks]
            rows = tuple(r for r in dict.fromkeys(self.find(first, operand, c) for c in wanted) if r is not None)
            own = None if operand == GRAD_OUTPUT else self.rows.get((operand, True))
            column = None if own is None else first + own
            lowest = min((row for (o, _), row in self.rows.items() if o == operand), default=-1)
            found = self.known[key] = self._made(rows, first + lowest if lowest >= 0 else -1, column, columnwise)
        return found

    def part(self, rows: tuple[int, ...]) -> OperandRows:
        """Some rows of one operand."""
        found = self._parts.get(rows)
        if found is None:
            found = self._parts[rows] = self._made(rows, -1, None, False)
        return found

    def _made(self, rows: tuple[int, ...], first: int, column: int | None, columnwise: bool) -> OperandRows:
        quantizers = tuple(self.quantizers[row] for row in rows)
        left = self.unobserved
        return OperandRows(
            rows,
            quantizers,
            together=read_together(quantizers),
            merges=bool(rows) and can_merge(quantizers) and not any(row in left for row in rows),
            kind=self._kind_of(quantizers),
            stateful=any(q.stateful for q in quantizers),
            observed=any(row not in left for row in rows),
            looked_at=tuple(row for row in rows if row not in left or self.quantizers[row].stateful),
            first=first,
            asks_column=column if columnwise else None,
            leaves_column=None if columnwise else column,
        )

    def _kind_of(self, quantizers: tuple[SiteQuantizer, ...]) -> int | None:
        if not all(type(q) in (SiteQuantizer, MxQuantizer, Nvfp4Quantizer, RowwiseQuantizer) for q in quantizers):
            return None
        how = tuple((type(q), q.spec, q.columnwise, q.backend.NAME) for q in quantizers)
        return self._kinds.setdefault(how, len(self._kinds))

    def is_weight(self, row: int) -> bool:
        """Whether a row is a Linear's weight, rowwise where it has that."""
        if row >= len(self.quantizers):
            return False
        return row % len(self.rows) == self.rows.get((WEIGHT, False), self.rows.get((WEIGHT, True)))

    def any_observed(self, first: int) -> bool:
        """Whether any site of the Linear with this first row is observed."""
        return not self.unobserved or any(row not in self.unobserved for row in range(first, first + len(self.rows)))

    def resting(self, sample: StepSample) -> ByRow:
        """Of each Linear's first row whether none of its sites is looked at, and its weight is not hashed."""
        num, each = len(self.quantizers), len(self.rows)
        if self._never is None:
            seen = [row not in self.unobserved for row in range(num)]
            self._never = np.array([not any(seen[row : row + each]) for row in range(num)], dtype=np.bool_)
        if sample.light is YES and not self.unobserved:
            return NO
        rests = self._never | (_as_array(sample.light, num) == 0)
        weight = self.rows.get((WEIGHT, False), self.rows.get((WEIGHT, True), 0))
        rests[: num - weight] &= _as_array(sample.hashes, num)[weight:] == 0
        of_each: bytes = rests.tobytes()
        return of_each

    def replace(self, row: int, quantizer: SiteQuantizer) -> None:
        """Put another quantiser on a site."""
        self.quantizers = [*self.quantizers[:row], quantizer, *self.quantizers[row + 1 :]]
        self.known.clear()
        self._parts.clear()


def _as_array(rows: ByRow, num: int) -> npt.NDArray[np.uint8]:
    if isinstance(rows, bytes):
        return np.frombuffer(rows, dtype=np.uint8, count=num)
    return np.full(num, rows[0], dtype=np.uint8)
