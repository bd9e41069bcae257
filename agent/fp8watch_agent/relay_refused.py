"""What a collector has refused for good, as a relay keeps it for whoever looks for the reason: some of it.

Shapes:     bodies -> files under refused/
Thread:     any
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

from fp8watch_agent.batch import Parcel
from fp8watch_agent.spool_segment import REFUSED_FOLDER, quarantine

log = logging.getLogger("fp8watch.relay")

MAX_FILES = 256
MAX_BYTES = 64 << 20
"""Of all sessions together, those of earlier relays among them."""


class Refused:
    """The folder of refused bodies.

    Args:
        directory: of the relay.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._told: set[tuple[str, str]] = set()  # session and reason

    def keep(self, session: str, parcel: Parcel, reason: str) -> None:
        """Write a body where there is room for it, and say once of a session and a reason what became of it."""
        with self._lock:
            kept = False
            with contextlib.suppress(OSError):
                if self._has_room(len(parcel.body)):
                    quarantine(self._directory, session, parcel, reason)
                    kept = True
            first = (session, reason) not in self._told
            self._told.add((session, reason))
        if first:
            where = "it is kept under refused/" if kept else "it is not kept: refused/ is full, or cannot be written"
            rest = "further ones are only counted, and kept while there is room"
            log.warning("session %s, batch %d is refused (%s); %s; %s", session, parcel.seq, reason, where, rest)

    def _has_room(self, num_bytes: int) -> bool:
        """Looks every time: somebody may have taken files away."""
        sizes = [path.stat().st_size for path in (self._directory / REFUSED_FOLDER).glob("*")]
        return len(sizes) < MAX_FILES and sum(sizes) + num_bytes <= MAX_BYTES
