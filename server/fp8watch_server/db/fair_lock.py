"""FIFO lock.

Thread:     any

threading.Lock lets the thread that has just released it acquire it again at once; under load the group committer would
do so for ever, and everybody else would get "the database is busy".
"""

from __future__ import annotations

import threading
import time
from collections import deque


class FairLock:
    """A mutex granted in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[threading.Event] = deque()

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the lock; False on timeout."""
        with self._lock:
            if not self._taken and not self._line:
                self._taken = True
                return True
            mine = threading.Event()
            self._line.append(mine)
        until = time.monotonic() + timeout_s
        if mine.wait(max(0.0, until - time.monotonic())):
            return True
        with self._lock:
            if mine.is_set():  # granted while we were timing out
                return True
            self._line.remove(mine)
            return False

    def release(self) -> None:
        """Pass the lock to the next waiter."""
        with self._lock:
            if self._line:
                self._line.popleft().set()
            else:
                self._taken = False
