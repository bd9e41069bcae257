"""A run whose full statistics go round: in each step a part of the sites has energies and moments, staggered over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from detect.light import CALIBRATED, SAMPLED_ONLY
from detect.trace import Trace

from fp8watch_agent.record import FIELDS
from fp8watch_agent.wire import Batch


def rotating(batches: Iterable[Batch], every: int, first: int = 0) -> Iterator[Batch]:
    """The same batches with each site in full once in `every` steps, and all of them in the first steps."""
    for batch in batches:
        turn = (np.unique(batch.site, return_inverse=True)[1] * 7 + 3 * batch.header.rank) % every
        light = (batch.step >= first + CALIBRATED) & (batch.step % every != turn)
        sent = {name: batch.column(name) for name in batch.sent}
        sent["measured"] = np.where(light, batch.column("measured") & ~int(SAMPLED_ONLY), batch.column("measured"))
        for f in FIELDS:
            if f.name in sent and f.group & SAMPLED_ONLY:
                mask = light if f.size == 1 else light[:, None]
                sent[f.name] = np.where(mask, np.asarray(f.default, dtype=f.dtype), sent[f.name])
        yield replace(batch, sent=sent)


class Rotated(Trace):
    """A trace that `play` sends in this way."""

    every: int = 16

    def batches(self, per_batch: int = 8, every: int = 1) -> Iterator[Batch]:
        return rotating(super().batches(per_batch, every), self.every, int(self.steps["step"][0]))


def turned(trace: Trace, every: int) -> Trace:
    """A trace with its full statistics going round."""
    made = Rotated(**trace.__dict__)
    made.every = every
    return made
