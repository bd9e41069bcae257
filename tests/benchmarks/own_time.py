"""The clock of one model, where several take turns in a process.

A watch looks at quantisers, GEMMs and updates for a share of the time that training takes, and reads from a clock when the
next look is due. While others have their turns that clock must stand still: else each model of eight would have eight times
its share, and be measured with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fp8watch.observer import observation_plan
from fp8watch.session import update_turns

Found = TypeVar("Found")
_PACED = (observation_plan, update_turns)


class OwnTime:
    """Seconds since some moment, without those in which the model did not run."""

    def __init__(self) -> None:
        self._ran, self._began = time.perf_counter(), 0.0

    def __call__(self) -> float:
        """Of a model that runs."""
        return self._ran + time.perf_counter() - self._began

    def start(self) -> None:
        """The model runs, and what is paced reads this clock."""
        self._began = time.perf_counter()
        for module in _PACED:
            module.__dict__["perf_counter"] = self

    def stop(self) -> None:
        """Others run."""
        self._ran = self()


def in_own_time(run: Callable[[], Found]) -> Callable[[], Found]:
    """What runs one model, with a clock of its own. Where nothing runs any more the last one stays."""
    clock = OwnTime()

    def timed() -> Found:
        clock.start()
        try:
            return run()
        finally:
            clock.stop()

    return timed
