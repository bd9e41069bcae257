"""What the ingest counts of itself, for /metrics.

Thread:     event loop and ingest pool; counters are guarded by one lock
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from fp8watch_server.http.errors import Problem

COMMIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


OUTCOMES: tuple[str, ...] = (
    "accepted",
    "refused",
    "conflict",
    "forbidden",
    "too_large",
    "unregistered",
    "overload",
    "quota",
)
OUTCOMES += ("cut_short", "unavailable", "failed")
_OF_STATUS = {
    **dict.fromkeys((400, 415, 422), "refused"),
    403: "forbidden",
    409: "conflict",
    413: "too_large",
    424: "unregistered",
    429: "overload",
    503: "unavailable",
}


def outcome_of(e: Problem) -> str:
    """What becomes of a body with this answer, by what agents do with it (`fp8watch_agent.transport.judge`).

    `refused` is given up, a `conflict` sent again under another key, what is `too_large` in halves, `forbidden` held back until a person
    changes something, and the rest sent again as it is.
    """
    if str(e.extra.get("error", "")).startswith("quota-"):
        return "quota"
    if isinstance(e.__cause__, ClientDisconnect):  # there is nobody whom the answer reaches
        return "cut_short"
    return _OF_STATUS.get(e.status, "failed")


class SecondsHistogram:
    """A cumulative histogram of seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(COMMIT_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        with self._lock:
            self._counts[bisect_left(COMMIT_BUCKETS_S, seconds)] += 1
            self._sum_s += seconds

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative (upper bound, count) up to +Inf, and the sum."""
        with self._lock:
            total, out = 0, []
            for bound, count in zip([*map(str, COMMIT_BUCKETS_S), "+Inf"], self._counts, strict=True):
                total += count
                out.append((bound, float(total)))
            return out, self._sum_s


class _Outcome:
    num_bytes = 0
    name = "failed"

    def accepted(self, num_bytes: int) -> None:
        self.name, self.num_bytes = "accepted", num_bytes


class Held:
    """The bytes of one body that are in memory."""

    def __init__(self, stats: IngestStats) -> None:
        self._stats = stats
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many more."""
        self.num_bytes += num_bytes
        with self._stats.lock:
            self._stats.inflight_bytes += num_bytes

    @property
    def total_bytes(self) -> int:
        """Of all bodies together."""
        return self._stats.inflight_bytes


class IngestStats:
    """Bodies by outcome, bytes, and what is in flight."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.num_bytes = 0
        self.inflight_bytes = 0
        self.commit_seconds = SecondsHistogram()

    @contextmanager
    def inflight(self) -> Iterator[Held]:
        """A body is on its way through memory."""
        held = Held(self)
        try:
            yield held
        finally:
            held.add(-held.num_bytes)

    @contextmanager
    def one_body(self) -> Iterator[_Outcome]:
        """Count one body by what became of it."""
        outcome = _Outcome()
        try:
            yield outcome
        except Problem as e:
            outcome.name = outcome_of(e)
            raise
        except SQLAlchemyError:
            outcome.name = "unavailable"
            raise
        finally:
            with self.lock:
                self.outcomes[outcome.name] += 1
                self.num_bytes += outcome.num_bytes
