"""Sessions whose batches are being refused: how long each waits, and which collector refused it.

Shapes:     session -> a time
Thread:     any; one lock

Who is held is tried again with its oldest batch alone, so that the order of its rank is kept and nobody else waits for it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""A relay has few connections: a collector that is there again is to be noticed soon."""

JUST_NOW_S = 1.0


@dataclass
class _Hold:
    at: float
    until: float
    failures: int
    collector: int | None
    why: str


class Holds:
    """The held sessions of a relay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, _Hold] = {}

    def __contains__(self, session: object) -> bool:
        return session in self._of

    def __len__(self) -> int:
        return len(self._of)

    def hold(self, session: str, collector: int | None, why: str, least_s: float = 0.0, after: int = 0) -> bool:
        """A batch was refused for now: wait twice as long as before. True: it was not held.

        Args:
            collector: who refused it; None: it could not be sent.
            least_s: wait at least so long, once it has been refused more than `after` times.
        """
        with self._lock:
            before = self._of.get(session)
            failures = 0 if before is None else before.failures + 1
            wait_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(failures, 16))
            if failures >= after:
                wait_s = max(wait_s, least_s)
            now = time.monotonic()
            self._of[session] = _Hold(now, now + wait_s, failures, collector, why)
            return before is None

    def release(self, session: str) -> tuple[bool, int | None]:
        """It is taken again.

        Returns:
            Whether it was held, and the number of a collector that refused it less than JUST_NOW_S ago.
        """
        with self._lock:
            before = self._of.pop(session, None)
        recent = before is not None and time.monotonic() - before.at < JUST_NOW_S
        return before is not None, before.collector if before is not None and recent else None

    def due(self) -> list[str]:
        """Those to try now, the longest overdue first."""
        now = time.monotonic()
        with self._lock:
            found = sorted((hold.until, session) for session, hold in self._of.items() if hold.until <= now)
        return [session for _, session in found]

    def why(self) -> str:
        """What one of them was refused with; "": none is held."""
        with self._lock:
            return next((hold.why for hold in self._of.values()), "")
