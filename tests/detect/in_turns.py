"""A run of which each module is looked at once in 16 steps, as where nothing is quantised for a GEMM and looks are dear."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
from detect.scenarios import Case
from detect.trace import Trace

from fp8watch_agent.wire import Batch

FIRST_STEPS = 12
MEASURED = (24, 36, 48, 60, 72, 172, 272, 372, 472, 572, 672)
"""Steps in which the agent measures what observing costs, and looks at everything."""


def in_turns(trace: Trace, every: int = 16) -> Trace:
    """A trace that `play` sends in this way."""
    made = _InTurns(**trace.__dict__)
    made.every = every
    return made


def of_all(case: Case, every: int = 16) -> Case:
    """All traces of a case."""
    return replace(case, traces=[in_turns(t, every) for t in case.traces])


class _InTurns(Trace):
    every: int = 16

    def batches(self, per_batch: int = 8, every: int = 1) -> Iterator[Batch]:
        modules = list(dict.fromkeys(s.module for s in self.sites))
        turn = {int(s.id): (modules.index(s.module) + 5 * self.rank) % self.every for s in self.sites}
        return _turning(super().batches(per_batch, every), turn, self.every)


def _turning(batches: Iterable[Batch], turn: dict[int, int], every: int) -> Iterator[Batch]:
    for batch in batches:
        mine = np.array([turn[int(site)] for site in batch.site])
        broken = (batch.column("num_nan") > 0) | (batch.column("num_inf") > 0)
        at = (mine == batch.step % every) | (batch.step < FIRST_STEPS) | np.isin(batch.step, MEASURED) | broken
        header = msgspec.structs.replace(batch.header, num_records=int(np.count_nonzero(at)), per_step=0)
        sent = {name: batch.column(name)[at] for name in batch.sent}
        yield replace(batch, header=header, step=batch.step[at], site=batch.site[at], sent=sent)
