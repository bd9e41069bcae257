"""Exception guard around every entry from training: errors are counted and never reach the host.

Thread:     any; nothing is written or logged on the thread that failed
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger("fp8watch")

P = ParamSpec("P")
T = TypeVar("T")
MAX_PLACES = 64


class Guard:
    """Swallows and counts exceptions by place. KeyboardInterrupt and SystemExit pass through.

    The first error of a place is kept as text; the sender thread logs it, because logging is I/O.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self._to_log: deque[str] = deque(maxlen=MAX_PLACES)

    def call(self, place: str, fn: Callable[[], T], default: T) -> T:
        """Return `fn()`, or `default` when it raises."""
        try:
            return fn()
        except Exception as e:  # noqa: BLE001 - this is the guard
            self.swallow(place, e)
            return default

    def run(self, place: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return `fn(*args, **kwargs)`, or None when it raises."""
        try:
            return fn(*args, **kwargs)
        except Exception as e:  # noqa: BLE001 - this is the guard
            self.swallow(place, e)
            return None

    def swallow(self, place: str, error: BaseException) -> None:
        """Count an error of `place`; keep the first one for the log."""
        seen = self.errors.get(place, 0)
        self.errors[place] = seen + 1
        if seen == 0:
            # str() of a hostile exception may raise, too
            try:
                text = f"{type(error).__name__}: {error}"
            except Exception:  # noqa: BLE001
                text = type(error).__name__
            self._to_log.append(
                f"internal error in {place}, swallowed; training is not touched: {text} "
                "(further ones of this place are only counted)"
            )

    def emit(self) -> None:
        """Write queued errors to the log. Never called on the training thread while it trains."""
        while self._to_log:
            logger.warning("%s", self._to_log.popleft())
