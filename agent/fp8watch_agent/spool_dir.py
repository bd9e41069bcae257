"""Choice of a writable folder for ring and spool, with a fallback.

Thread:     the one that attaches
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

logger = logging.getLogger("fp8watch")


def usable_directory(wanted: Path) -> Path | None:
    """`wanted` if it can be written to; else a temporary folder, with one warning; None where there is none at all."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as e:
        try:
            other = Path(tempfile.mkdtemp(prefix="fp8watch-"))
        except OSError:
            logger.warning("spool folder %s cannot be written (%s), nor a temporary one: nothing is spooled", wanted, e)
            return None
        logger.warning("spool folder %s cannot be written (%s); %s is used: set FP8WATCH_SPOOL_DIR", wanted, e, other)
        return other
