"""A run as one of many ranks sends it: full statistics go round, and light rows that say nothing new share a record."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from detect.rotated import rotating
from detect.trace import Trace

from fp8watch.session.event_follow import EventFollow, broken_rows
from fp8watch.session.window_merge import WindowMerge
from fp8watch_agent.record import ROW, empty_rows
from fp8watch_agent.wire import Batch


class MergedTrace(Trace):
    """A trace that `play` sends in this way."""

    every: int = 16
    merge_steps: int = 16

    def batches(self, per_batch: int = 8, every: int = 1) -> Iterator[Batch]:
        follow = EventFollow(len(self.sites))
        merge = WindowMerge(len(self.sites), self.merge_steps, self.rank)
        for batch in rotating(super().batches(per_batch, every), self.every, int(self.steps["step"][0])):
            num = len(self.sites)
            records, steps, sites = [], [], []
            for t, header in enumerate(batch.steps):
                part = slice(t * num, (t + 1) * num)
                rows = empty_rows(num)
                for name in batch.sent:
                    rows[name] = batch.column(name)[part]
                step = int(header["step"])
                broken = broken_rows(rows)
                numbers = {name: float(header[name]) for name in ("loss", "grad_norm")}
                followed = follow.look(step, step, rows, broken, numbers)
                leaves, out = np.ones(num, dtype=bool), rows
                if followed.calm is not None:
                    leaves, out = merge.leaving(step, rows, followed.calm, in_burst=step <= follow.follow.burst_until)
                records.append(out)
                steps.append(np.full(len(out), step))
                sites.append(batch.site[part][leaves])
            joined: np.ndarray = np.concatenate(records)
            yield Batch(
                header=msgspec.structs.replace(batch.header, num_records=len(joined)), steps=batch.steps, step=np.concatenate(steps), site=np.concatenate(sites),
                sent={name: joined[name] for name in ROW.names or () if name in batch.sent},
            )  # fmt: skip


def merged(trace: Trace, every: int = 16, merge_steps: int = 16) -> Trace:
    """A trace whose calm rows share records."""
    made = MergedTrace(**trace.__dict__)
    made.every, made.merge_steps = every, merge_steps
    return made
