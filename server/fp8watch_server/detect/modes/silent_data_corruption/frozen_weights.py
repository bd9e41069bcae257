"""Weights that nothing trains, and that something wrote: mode 15, silent-data-corruption, as information.

Shapes:     hashes of weights [S], each in its turn -> at most one finding
Thread:     detect worker

A frozen base under adapters is in no optimizer, so what stands between two updates is not held against what they left, and a leap of
less than an octave is no leap. Its hash is exact: it was the same at each look, is another one, and is the same again at the look
behind that, where one that is trained from then on moves on. What writes does so to many at once, and each is hashed in its turn:
it is told once all had theirs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.step_view import GRAD_OUTPUT, Mask

STOOD = 2
"""Looks at which the hash was that of the look before, before it changed."""
HOLD_STEPS = 32
"""After the first of them is known: in so many steps each weight is hashed."""
_ARRAYS = {"_hash": np.nan, "_at": -1, "_same": 0, "_rank": -1, "_before": -1, "_seen": -1, "_from": -1, "_to": -1}
"""Name of an array of a number for each site -> what it begins with."""


class FrozenWeights(Detector):
    """Hashes of weights that stand."""

    modes = ("silent-data-corruption",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._hash = np.full(num_sites, np.nan)
        self._at = np.full(num_sites, -1, dtype=np.int64)  # step of the last look
        self._same = np.zeros(num_sites, dtype=np.int64)  # looks in a row at which it stood
        self._rank = np.full(num_sites, -1, dtype=np.int64)  # whose hash it is
        self._before = np.full(
            num_sites, -1, dtype=np.int64
        )  # step of the look before it changed, until it stands again
        self._seen = np.full(num_sites, -1, dtype=np.int64)  # ... and of the one at which it had
        self._from = np.full(num_sites, -1, dtype=np.int64)  # the same, of those that are to be told
        self._to = np.full(num_sites, -1, dtype=np.int64)
        self._until = -1

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._at)
        for name, value in _ARRAYS.items() if more > 0 else ():
            known = getattr(self, name)
            setattr(self, name, np.concatenate([known, np.full(more, value, dtype=known.dtype)]))

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """Weights were loaded: they may be others."""
        for name, value in _ARRAYS.items():
            getattr(self, name)[:] = value
        self._until = -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now = ctx.now
        self._rank = np.where(self._rank < 0, now.first_ranks(), self._rank)
        value = now.of_rank("weight_hash", self._rank)
        looked = ctx.weights() & np.isfinite(value)
        if looked.any():
            self._look(ctx, looked, value)
        if not 0 <= self._until <= now.step:
            return []
        found, self._until = self._finding(ctx), -1
        self._from[:], self._to[:] = -1, -1
        return [found]

    def _look(self, ctx: Context, looked: Mask, value: npt.NDArray[np.float64]) -> None:
        step, known = ctx.now.step, looked & np.isfinite(self._hash)
        stands, moved = known & (value == self._hash), known & (value != self._hash)
        waits = self._before >= 0
        written = stands & waits
        self._from[written], self._to[written] = self._before[written], self._seen[written]
        begins = moved & ~waits & (self._same >= STOOD) & ~_trained(ctx)
        self._before[known] = np.where(begins, self._at, -1)[known]
        self._seen[begins] = step
        self._same = np.where(stands, self._same + 1, np.where(moved, 0, self._same))
        self._hash, self._at = np.where(looked, value, self._hash), np.where(looked, step, self._at)
        if written.any() and self._until < 0:
            self._until = step + HOLD_STEPS

    def _finding(self, ctx: Context) -> Finding:
        now, hit = ctx.now, self._to >= 0
        rows = now.in_flow(hit)
        last, first = int(self._from[hit].max()), int(self._to[hit].min())
        if last >= first:  # not at once
            last, first = int(self._from[hit].min()), int(self._to[hit].max())
        num_frozen = int(np.count_nonzero((self._same >= STOOD) | hit))
        evidence = [
            Evidence("written_weights", len(rows), 0, f"of {num_frozen} that stood", first),
            Evidence("last_same_step", last, None, "step", None),
        ]
        return now.finding(
            "silent-data-corruption", "info", rows, evidence, "shared", kind="frozen-written", num=len(rows), num_frozen=num_frozen,
            between=(last, first), began=last + 1, not_before=last + 1,
        )  # fmt: skip


def _trained(ctx: Context) -> Mask:
    """Sites of modules whose wgrad is computed, where an operand of its own says so. [S]"""
    table = ctx.now.table
    return np.asarray(np.isin(table.module, table.module[(table.role == GRAD_OUTPUT) & ~table.rowwise]))
