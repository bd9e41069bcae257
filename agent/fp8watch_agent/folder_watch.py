"""Watch over the spool folder: ring file and spool are made anew where somebody has deleted them or they cannot be written,
and it is said.

Thread:     sender
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fp8watch_agent.ring import Ring
from fp8watch_agent.spool import Spool

LOOK_EVERY_S = 1.0
TRY_AGAIN_S = 30.0


class FolderWatch:
    """Looks now and then.

    Args:
        warn: key and message; each key is said once.
    """

    def __init__(self, ring: Ring, spool: Spool | None, warn: Callable[[str, str], None]) -> None:
        self._ring, self._spool, self._warn = ring, spool, warn
        self._look_at = 0.0

    def look(self) -> None:
        """Under the sender's lock."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        folder = "" if self._ring.path is None else str(self._ring.path.parent)
        rest = "until it can be, a SIGKILL loses the last steps"
        if (error := self._ring.failed) is not None:
            self._warn("ring", f"the ring in the spool folder {folder} cannot be written ({error}); {rest}")
        try:
            gone = self._ring.renew()
            if self._spool is not None:
                gone = self._spool.look_after() or gone
        except OSError as e:
            self._look_at = now + TRY_AGAIN_S
            if error is None:
                why = f"files of the spool folder {folder} were deleted and cannot be made anew ({e})"
                self._warn("folder", f"{why}; {rest}")
            return
        if gone:
            rest = "they were made anew; what only they held is counted as dropped (spool_damaged)"
            self._warn("deleted", f"files of the spool folder {folder} were deleted while training runs; {rest}")
