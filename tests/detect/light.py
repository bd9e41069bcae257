"""A run as `attach` sends it by default: light rows in every step, energies and moments in a sampled one only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from fp8watch_agent.record import FIELDS, Measured
from fp8watch_agent.wire import Batch

SAMPLED_ONLY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH
CALIBRATED = 4
"""Steps at the start that are measured in full."""


def lightly(batches: Iterable[Batch], every: int) -> Iterator[Batch]:
    """The same batches, with what only a full sample has taken out of the steps between samples."""
    for batch in batches:
        light = (batch.step >= CALIBRATED) & (batch.step % every != 0)
        sent = {name: batch.column(name) for name in batch.sent}
        sent["measured"] = np.where(light, batch.column("measured") & ~int(SAMPLED_ONLY), batch.column("measured"))
        for f in FIELDS:
            if f.name in sent and f.group & SAMPLED_ONLY:
                mask = light if f.size == 1 else light[:, None]
                sent[f.name] = np.where(mask, np.asarray(f.default, dtype=f.dtype), sent[f.name])
        yield replace(batch, sent=sent)
