"""Lines for people on standard error.

Thread:     any

It may be closed (`2>&-`, a daemon), or its reader gone (`2>&1 | head`): then a line is lost, and nothing raises into training.
"""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Write one line, if there is anywhere to write it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, no reader, closed
        sys.stderr.write(f"fp8watch: {text}\n")
