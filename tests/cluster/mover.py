"""`fp8watch shards` as a process that kills itself with kill -9 at the point that FP8WATCH_TEST_CRASH names."""

from __future__ import annotations

import os
import signal
import sys

from fp8watch_server.moving.command import main


def crash(point: str) -> None:
    """Die here, if it is here."""
    if point == os.environ.get("FP8WATCH_TEST_CRASH"):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], crash))
