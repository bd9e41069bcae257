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
from collections.abc import Callable, Collection

from fp8watch_agent.urgency import is_urgent

AGAIN_S = 2.0
MAX_RUNS = 1024
"""Limit of the runs whose last urgent time is kept."""

Run = tuple[str, str]  # run id, tenant


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

    def take(self, but: Collection[Run] = ()) -> Run | None:
        """Remove and return the run that has waited longest, of those that are not among `but`."""
        with self._lock:
            run = next((run for run in self._waiting if run not in but), None)
            if run is None:
                return None
            del self._waiting[run]
            self._taken_at[run] = self._clock()
            self._taken_at.move_to_end(run)
            while len(self._taken_at) > MAX_RUNS:
                self._taken_at.popitem(last=False)
            return run

    def clear(self) -> None:
        """Forget all: another collector processes them, or what waits is looked through."""
        with self._lock:
            self._waiting.clear()
            self._taken_at.clear()


__all__ = ["AGAIN_S", "PriorityLane", "Run", "is_urgent"]
