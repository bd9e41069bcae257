"""LRU cache of merged segments of hot batches: while a run goes on, only its last steps are merged again.

Shapes:     (what was asked, the batches that it rests on) -> Parts, merged over ranks
Thread:     query pool

The key of a segment contains every batch with a step in it, so a new or compacted batch gives a new key.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fp8watch_server.store.records import Parts

PIECE_STEPS = 64
MAX_SPAN_STEPS = 1 << 16
"""Batches whose steps are further apart are not cut into segments."""
CACHE_BYTES = 64 << 20


class SegmentCache:
    """LRU cache of Parts."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Parts, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Parts]) -> Parts:
        """Return a segment, computed if missing."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found[0]
        parts = make()
        size = 1024 + sum(a.nbytes for a in (parts.site, parts.step, parts.rank, parts.attempt, parts.seq))
        size += sum(values.nbytes for values in parts.columns.values())
        with self._lock:
            if key not in self._kept and size <= self._max_bytes:
                self._kept[key] = (parts, size)
                self._bytes += size
                while self._bytes > self._max_bytes:
                    self._bytes -= self._kept.popitem(last=False)[1][1]
        return parts


SEGMENTS = SegmentCache()


def segments_of(rows: Sequence[Any], from_step: int, to_step: int) -> dict[int, list[Any]] | None:
    """First step of each segment -> hot batches that may have a step in it; None when steps are too far apart."""
    out: dict[int, list[Any]] = {}
    for row in rows:
        first, last = max(row.step_min, from_step), min(row.step_max, to_step)
        if last - first > MAX_SPAN_STEPS:
            return None
        for start in range(first - first % PIECE_STEPS, last + 1, PIECE_STEPS):
            out.setdefault(start, []).append(row)
    return out


def batch_keys(rows: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Identity of a hot batch in a cache key."""
    return tuple((row.arrival, row.step_min, row.received_at) for row in rows)
