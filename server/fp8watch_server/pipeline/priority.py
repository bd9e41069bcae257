"""What cannot wait for the next round of the detectors: batches with something non-finite, or a broken scale.

Upstream:   fp8watch_server.ingest.group_commit    Downstream: fp8watch_server.pipeline.detect_worker
Shapes:     a checked batch -> whether it is urgent; runs with urgent batches, for the worker to take first
Thread:     the committer looks and adds, the detect worker takes

The detectors look at all that has come in rounds, because writing costs per transaction. Under load a round takes a second,
and a NaN would wait for the one that is under way and for its turn in the next. A batch tells by itself that it is worth
more: columns at their default are left out, so of a healthy one there is next to nothing to look at. What is urgent is
taken first and judged as everything is, in the order of arrival within its run.

A run that stays broken is urgent in every batch. It is taken out of turn once in AGAIN_S, and else with the rounds: its
incident is open by then, and the other runs have a right to be looked at.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from fp8watch_agent.record import STEP_SCALARS
from fp8watch_agent.wire import Batch

BROKEN_COUNTS = ("num_nan", "num_inf", "num_sentinel_tiles", "num_off_scale_tiles", "output_num_nonfinite")
"""Counts that are 0 in every record of a healthy step."""
BROKEN_SCALARS = ("loss", "grad_norm")
AGAIN_S = 2.0
MAX_RUNS = 1024
"""Of which it is remembered when they were urgent."""

Run = tuple[str, str]  # run id, tenant


def is_urgent(batch: Batch) -> bool:
    """Whether a batch holds something non-finite, or a scale that no rounding explains."""
    steps = batch.steps
    for name in BROKEN_SCALARS:
        broken = ~np.isfinite(steps[name])
        if broken.any() and (broken & ((steps["present"] & STEP_SCALARS[name]) != 0)).any():
            return True
    return any(name in batch.sent and bool(batch.sent[name].any()) for name in BROKEN_COUNTS)


class Urgent:
    """Runs that wait to be taken out of turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Run, None] = OrderedDict()
        self._taken_at: OrderedDict[Run, float] = OrderedDict()

    def add(self, run: Run) -> bool:
        """A run has an urgent batch. False where it was taken a moment ago, and waits for its turn as all do."""
        with self._lock:
            taken_at = self._taken_at.get(run)
            if taken_at is not None and self._clock() - taken_at < AGAIN_S:
                return False
            self._waiting[run] = None
            return True

    def __bool__(self) -> bool:
        """Whether any waits."""
        return bool(self._waiting)

    def take(self) -> Run | None:
        """The run that waits longest."""
        with self._lock:
            if not self._waiting:
                return None
            run, _ = self._waiting.popitem(last=False)
            self._taken_at[run] = self._clock()
            self._taken_at.move_to_end(run)
            while len(self._taken_at) > MAX_RUNS:
                self._taken_at.popitem(last=False)
            return run

    def clear(self) -> None:
        """Nothing waits: another collector takes it."""
        with self._lock:
            self._waiting.clear()
