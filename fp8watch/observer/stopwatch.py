"""What observing takes, span by span: by the CPU time of the thread on a CPU, by the device's own events on a GPU.

Thread:     training, and autograd's

A launch on a GPU returns at once, so the host's clock says nothing about it. There, events are recorded into the stream
around what is timed, and read in a later step, when the device has passed them: nothing waits. Where neither can be
had (another device, a CUDA graph that is being captured) nothing is measured, and nothing is said.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

LIGHT, FIXED, SAMPLING, EXTRA, STEP = "light", "fixed", "sampling", "extra", "step"
"""Of a step: what observing takes in each step for its operands, and besides; what full statistics take on top; what
measuring takes; all of it."""


class Event(Protocol):
    """A mark in a device's stream, such as torch.cuda.Event(enable_timing=True)."""

    def record(self) -> None:
        """Put it at the end of the current stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to another."""


def events_of(device: torch.device) -> Callable[[], Event] | None:
    """What makes events on a device; None for the CPU.

    Raises:
        NotImplementedError: for this device there is no clock here.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    raise NotImplementedError(f"no clock for device {device.type}")


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Stopwatch:
    """The spans of one step. No method raises or waits; a clock that fails measures nothing.

    Args:
        event: makes a device's events; None for the host's clock.
        clock: in seconds; of this thread alone, because what others do meanwhile costs training nothing of ours.
    """

    def __init__(self, event: Callable[[], Event] | None = None, clock: Callable[[], float] = time.thread_time) -> None:
        self._event, self._clock = event, clock
        self._spans: list[tuple[str, Any, Any, int]] = []
        self._failed = False
        self.began = self.mark()

    def mark(self) -> Any:
        """This moment; None where it cannot be told."""
        if self._event is None:
            return self._clock()
        try:
            if self._failed or _capturing():
                self._failed = True
                return None
            event = self._event()
            event.record()
        except Exception:  # noqa: BLE001 - a device that cannot be timed is not measured, and training goes on
            self._failed = True
            return None
        return event

    def add(self, name: str, start: Any, end: Any, sign: int = 1) -> None:
        """Count the time between two marks; with `sign` −1 take it off again."""
        if start is not None and end is not None:
            self._spans.append((name, start, end, sign))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what runs inside."""
        start = self.mark()
        try:
            yield
        finally:
            self.add(name, start, self.mark())

    @property
    def empty(self) -> bool:
        """Whether nothing was timed."""
        return not self._spans

    def stop(self) -> None:
        """The step is over."""
        self.add(STEP, self.began, self.mark())

    def failed(self) -> bool:
        """Whether it will never have anything to say."""
        return self._failed

    def read(self) -> dict[str, float] | None:
        """Seconds by name; None while the device has not passed the last mark, or where the clock failed."""
        if self._failed:
            return None
        seconds = dict.fromkeys((LIGHT, FIXED, SAMPLING, EXTRA, STEP), 0.0)
        try:
            if self._event is not None and not all(end.query() for *_, end, _ in self._spans[-1:]):
                return None
            for name, start, end, sign in self._spans:
                took = end - start if self._event is None else start.elapsed_time(end) * 1e-3
                seconds[name] += sign * took
        except Exception:  # noqa: BLE001 - as above
            self._failed = True
            return None
        return seconds
