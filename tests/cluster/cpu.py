"""Processor time by part of a cluster under test, also of processes that were killed meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import psutil

EVERY_S = 2.0


class CpuAccount:
    """Looks at processes once in EVERY_S; what one worked after the last look at it is not counted.

    Args:
        parts: name of each part -> ids of its processes.
        with_children: parts whose processes have others of their own.
    """

    def __init__(self, parts: Callable[[], dict[str, Iterable[int]]], with_children: Collection[str] = ()) -> None:
        self._parts, self._with_children = parts, with_children
        self._seen: dict[tuple[str, int, float], float] = {}
        self._before: dict[tuple[str, int, float], float] = {}
        self._stop = threading.Event()
        self._began = self._machine()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuAccount:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        first = True
        while not self._stop.wait(0 if first else EVERY_S):
            self._look(first)
            first = False

    def _look(self, first: bool) -> None:
        for part, pids in self._parts().items():
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    for one in (process, *(process.children() if part in self._with_children else ())):
                        with contextlib.suppress(psutil.Error):
                            used = one.cpu_times()
                            key = part, one.pid, one.create_time()
                            self._seen[key] = used.user + used.system
                            if first:
                                self._before[key] = self._seen[key]

    @staticmethod
    def _machine() -> tuple[float, float]:
        times = psutil.cpu_times()
        return sum(times), times.idle + times.iowait

    def shares(self) -> dict[str, float]:
        """Share of all processor time of the machine since the start, by part; others and idle with them."""
        total, idle = (now - began for now, began in zip(self._machine(), self._began, strict=True))
        by_part: Counter[str] = Counter()
        for key, used in list(self._seen.items()):
            by_part[key[0]] += used - self._before.get(key, 0.0)
        out = {part: used / total for part, used in by_part.items()}
        out["idle"] = idle / total
        out["other work on the machine"] = 1 - sum(out.values())
        return {part: round(share, 3) for part, share in out.items()}
