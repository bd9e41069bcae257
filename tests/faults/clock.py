"""A clock that stands still until it is told otherwise, in place of `time` in the agent's modules."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from fp8watch_agent import sender, sync, transport, uploader


class Clock:
    """What the agent uses of `time`. The wall clock and the monotonic one move apart where a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0  # monotonic
        self.wall_s = 1.7e9
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.advance(seconds)

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return time.thread_time()

    def advance(self, seconds: float) -> None:
        """Time passes, on both clocks."""
        self.now_s += seconds
        self.wall_s += seconds

    def jump(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self.wall_s += seconds


def installed(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of every module of the agent that waits."""
    clock = Clock()
    module: ModuleType
    for module in (sender, sync, transport, uploader):
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", clock)
    return clock
