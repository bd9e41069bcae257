"""A run as one of many ranks sends it: full statistics go round, and light rows that say nothing new share a record."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from detect.rotated import rotating
from detect.trace import Trace

from fp8watch.session.event_follow import EventFollow
from fp8watch.session.row_glance import glance
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
        before = None  # STEP of the last one of the batch before
        for batch in rotating(super().batches(per_batch, every), self.every, int(self.steps["step"][0])):
            num = len(self.sites)
            records, steps, sites, headers = [], [], [], batch.steps
            for t, header in enumerate(batch.steps):
                part = slice(t * num, (t + 1) * num)
                rows = empty_rows(num)
                for name in batch.sent:
                    rows[name] = batch.column(name)[part]
                step = int(header["step"])
                numbers = {name: float(header[name]) for name in ("loss", "grad_norm")}
                follow.look(step, step, rows, glance(rows), numbers)
                in_burst = step <= follow.follow.burst_until
                leaving = merge.leaving(step, rows, follow.calm(), in_burst=in_burst)
                if len(leaving.windows):  # of the step before, which has left where it was of the batch before
                    records.append(leaving.windows)
                    steps.append(np.full(len(leaving.windows), int((before if t == 0 else batch.steps[t - 1])["step"])))
                    sites.append(batch.site[part][leaving.before])
                    headers = np.concatenate([[before], headers]) if t == 0 else headers
                records.append(leaving.records)
                steps.append(np.full(len(leaving.records), step))
                sites.append(batch.site[part][leaving.now])
            before = batch.steps[-1]
            order = np.argsort(np.concatenate(steps), kind="stable")
            joined: np.ndarray = np.concatenate(records)[order]
            named = {name for name in ROW.names or () if name in batch.sent} | {"window_steps_back", "amax_steps_back"}
            yield Batch(
                header=msgspec.structs.replace(
                    batch.header, num_records=len(joined), num_steps=len(headers), step0=int(headers["step"][0])
                ),
                steps=headers, step=np.concatenate(steps)[order], site=np.concatenate(sites)[order],
                sent={name: joined[name] for name in named},
            )  # fmt: skip


def merged(trace: Trace, every: int = 16, merge_steps: int = 16) -> Trace:
    """A trace whose calm rows share records."""
    made = MergedTrace(**trace.__dict__)
    made.every, made.merge_steps = every, merge_steps
    return made
