"""Does the compactor's work in processes that are killed at a named point: one line `POINT` in, one line out.

Out comes `killed` when SIGKILL ended the process there, `passed` when it came to the end without meeting the point.
"""

from __future__ import annotations

import os
import signal
import sys

from fp8watch_server.db.dialect import make_engine
from fp8watch_server.store.compactor import Compactor
from fp8watch_server.store.retention import Policy, prune


def work(url: str, point: str, now: float) -> None:
    def crash(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = make_engine(url)
    compactor = Compactor(engine, clock=lambda: now, crash=crash)
    while compactor.round().anything:
        pass
    if point.startswith("prune"):
        prune(engine, Policy(detail_hours=1.0, keep_steps=300), now + 7200, crash=crash)


def main() -> None:
    url, now = sys.argv[1], float(sys.argv[2])
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            work(url, line.strip(), now)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else "passed", flush=True)


if __name__ == "__main__":
    main()
