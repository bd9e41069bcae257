"""Tile statistics held by reference: those of the running step, and of the last few, within a budget of bytes.

Shapes:     TileStats [Mt, Kt], on the device where they were made     Thread: training

When something breaks, its own map is still here, and what led up to it. Nothing is copied for that: the tensors exist
anyway, and live a little longer. A model with more tiles than the budget holds keeps those of the sites that are wanted
(asked for, or broken lately) and of the first of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fp8watch.numerics.tile_stats import TileStats

Held = dict[int, list[tuple[int, TileStats]]]
"""Row -> (order of the call, its statistics), in the order of the calls."""

HISTORY_STEPS = 4


class HeldTiles:
    """The tiles of the running step.

    Args:
        max_bytes: of all that is held here. Sites that are wanted may take all of it, the others half.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.wanted: frozenset[int] = frozenset()
        self.keeps_one = False  # where every map is streamed: one call of each site, whatever it takes
        self._held: Held = {}
        self._bytes = self._last_bytes = 0

    def add(self, row: int, order: int, stats: TileStats) -> None:
        """Hold one call. Past the budget older calls of this site go first, then the call itself is let go."""
        size, held = stats.num_bytes, self._held
        if row not in held and 2 * (self._bytes + size) <= self.max_bytes:
            held[row] = [(order, stats)]
            self._bytes += size
            self._last_bytes += size
            return
        calls = held.get(row, [])
        limit = self.max_bytes if row in self.wanted else self.max_bytes // 2
        self._last_bytes -= calls[-1][1].num_bytes if calls else 0
        while calls and self._bytes + size > limit:
            self._bytes -= calls.pop(0)[1].num_bytes
        if self._bytes + size <= limit or (self.keeps_one and not calls):
            self._last_bytes += size
            calls.append((order, stats))
            held[row] = calls
            self._bytes += size
        elif not calls:
            held.pop(row, None)

    def take(self) -> tuple[Held, int]:
        """What the step has left, and what the last calls take of it; from here on nothing is held."""
        held, size, self._held, self._bytes, self._last_bytes = self._held, self._last_bytes, {}, 0, 0
        return held, size


class TileHistory:
    """The last call of each site in the last few steps.

    Args:
        max_bytes: of all that is held here; the oldest steps go first.
    """

    def __init__(self, max_bytes: int, num_steps: int = HISTORY_STEPS) -> None:
        self._max_bytes = max_bytes
        self._steps: deque[tuple[int, dict[int, TileStats], int]] = deque(maxlen=num_steps)

    def add(self, step: int, held: Mapping[int, list[tuple[int, TileStats]]], num_bytes: int) -> None:
        """Remember a step: of each row the last call, `num_bytes` together. A step that went back makes the history
        begin anew."""
        if self._steps and step <= self._steps[-1][0]:
            self._steps.clear()
        self._steps.append((step, {row: calls[-1][1] for row, calls in held.items()}, num_bytes))
        while len(self._steps) > 1 and sum(size for *_, size in self._steps) > self._max_bytes:
            self._steps.popleft()
        if self._steps[0][2] > self._max_bytes:
            self._steps.clear()

    def before(self, step: int, row: int) -> list[tuple[int, TileStats]]:
        """What is known of a row from earlier steps, the oldest first."""
        return [(number, last[row]) for number, last, _ in self._steps if number < step and row in last]
