"""Priority lane for batches with non-finite values or broken scales.

Upstream:   fp8watch_server.ingest.group_commit
Downstream: fp8watch_server.pipeline.detect_worker
Shapes:     a checked batch -> whether it is urgent; runs with urgent batches, for the worker to take first
Thread:     the committer looks and adds, the detect worker takes

The detectors process batches in rounds, because writing costs per transaction. Under load a round takes a second, and a
NaN would wait for the current round and for its turn in the next. Checking a batch is cheap: columns at their default
are omitted, so a healthy one has next to nothing to look at. Urgent runs are processed first, but in order of arrival
within their run.

A run that stays broken is urgent in every batch. It is moved ahead once in AGAIN_S only, and takes its normal turn
otherwise: its incident is open by then, and the other runs must be processed, too.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from fp8watch_agent.record import QUANTISER_FAULTS, STEP_SCALARS
from fp8watch_agent.wire import Batch

BROKEN_COUNTS = (
    "num_nan", "num_inf", "num_sentinel_tiles", "num_off_scale_tiles", "output_num_nonfinite", "num_nonfinite_outputs",
    *QUANTISER_FAULTS,
)  # fmt: skip
"""Counts that are 0 in every record of a healthy step."""
BROKEN_SCALARS = ("loss", "grad_norm")
AGAIN_S = 2.0
MAX_RUNS = 1024
"""Limit of the runs whose last urgent time is kept."""

Run = tuple[str, str]  # run id, tenant


def is_urgent(batch: Batch) -> bool:
    """Whether a batch holds a non-finite value, or a scale that no rounding explains."""
    steps = batch.steps
    for name in BROKEN_SCALARS:
        broken = ~np.isfinite(steps[name])
        if broken.any() and (broken & ((steps["present"] & STEP_SCALARS[name]) != 0)).any():
            return True
    return any(name in batch.sent and bool(batch.sent[name].any()) for name in BROKEN_COUNTS)


class PriorityLane:
    """Runs that wait to be processed out of turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Run, None] = OrderedDict()
        self._taken_at: OrderedDict[Run, float] = OrderedDict()

    def add(self, run: Run) -> bool:
        """Add a run with an urgent batch. False when it was moved ahead a moment ago, and waits for its normal turn."""
        with self._lock:
            taken_at = self._taken_at.get(run)
            if taken_at is not None and self._clock() - taken_at < AGAIN_S:
                return False
            self._waiting[run] = None
            return True

    def __bool__(self) -> bool:
        """Whether any run waits."""
        return bool(self._waiting)

    def take(self) -> Run | None:
        """Remove and return the run that has waited longest."""
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
        """Forget all: another collector processes them."""
        with self._lock:
            self._waiting.clear()
