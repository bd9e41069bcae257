"""Tile statistics held by reference: those of the running step, and of the last few, within a budget of bytes.

Shapes:     TileStats [Mt, Kt], on the device where they were made     Thread: training

When something breaks, its own map is still here, and what led up to it. Nothing is copied for that: the tensors exist
anyway, and live a little longer. A model with more tiles than the budget holds keeps those of the sites that are wanted
(asked for, or broken lately) and of the first of the others. A step in which nothing happens is a list of its calls, which
nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

from fp8watch.numerics.tile_stats import TileStats

Held = dict[int, list[tuple[int, TileStats]]]
"""Row -> (order of the call, its statistics), in the order of the calls."""
Call = tuple[tuple[int, ...], int, Sequence[TileStats]]
"""Rows of one operand, order of the first of them, and statistics, one a row."""

HISTORY_STEPS = 4


class StepTiles:
    """What one step has left.

    Args:
        calls: in their order.
        held: the same by row, where it was sorted already.
    """

    __slots__ = ("_calls", "_held", "num_bytes")

    def __init__(self, calls: Sequence[Call], num_bytes: int, held: Held | None = None) -> None:
        self._calls, self._held = calls, held
        self.num_bytes = num_bytes
        """Of all that it holds."""

    @property
    def by_row(self) -> Held:
        """The calls of each row."""
        if self._held is None:
            self._held, self._calls = _by_row(self._calls), ()
        return self._held

    def last_calls(self) -> StepTiles:
        """What is left of it where only the last call of each row stays."""
        if self._held is None:
            rows = [*chain.from_iterable(map(itemgetter(0), self._calls))]
            if len(set(rows)) == len(rows):
                return self
        last = {row: calls[-1:] for row, calls in self.by_row.items()}
        return StepTiles((), sum(calls[0][1].num_bytes for calls in last.values()), last)


def _by_row(calls: Sequence[Call]) -> Held:
    held: Held = {}
    for rows, order, measured in calls:
        for place, (row, stats) in enumerate(zip(rows, measured, strict=True)):
            held.setdefault(row, []).append((order + place, stats))
    return held


class HeldTiles:
    """The tiles of the running step.

    Args:
        max_bytes: of all that is held here. Sites that are wanted may take all of it, the others half.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.wanted: frozenset[int] = frozenset()
        self.keeps_one = False  # where every map is streamed: one call of each site, whatever it takes
        self._calls: list[Call] = []
        self._held: Held | None = None  # by row, as soon as not all calls fit
        self._bytes = 0

    def add(self, rows: tuple[int, ...], order: int, measured: Sequence[TileStats]) -> None:
        """Hold one call of an operand. Past the budget older calls of its sites go first, then the call itself is let go.

        Args:
            rows: one or two.
            order: of the first; the second has the next.
            measured: one a row.
        """
        if self._held is None:
            size = measured[0].num_bytes if len(measured) == 1 else measured[0].num_bytes + measured[1].num_bytes
            if 2 * (self._bytes + size) <= self.max_bytes:
                self._bytes += size
                self._calls.append((rows, order, measured))
                return
            self._held, self._calls = _by_row(self._calls), []
        for place, (row, stats) in enumerate(zip(rows, measured, strict=True)):
            self._make_room(self._held, row, order + place, stats)

    def _make_room(self, held: Held, row: int, order: int, stats: TileStats) -> None:
        size, calls = stats.num_bytes, held.get(row, [])
        limit = self.max_bytes if row in self.wanted else self.max_bytes // 2
        while calls and self._bytes + size > limit:
            self._bytes -= calls.pop(0)[1].num_bytes
        if self._bytes + size <= limit or (self.keeps_one and not calls):
            calls.append((order, stats))
            held[row] = calls
            self._bytes += size
        elif not calls:
            held.pop(row, None)

    def take(self) -> StepTiles:
        """What the step has left; from here on nothing is held."""
        left = StepTiles(self._calls, self._bytes, self._held)
        self._calls, self._held, self._bytes = [], None, 0
        return left


class TileHistory:
    """The last call of each site in the last few steps.

    Args:
        max_bytes: of all that is held here; the oldest steps go first.
    """

    def __init__(self, max_bytes: int, num_steps: int = HISTORY_STEPS) -> None:
        self._max_bytes = max_bytes
        self._steps: deque[tuple[int, StepTiles]] = deque(maxlen=num_steps)

    def add(self, step: int, left: StepTiles) -> None:
        """Remember a step: of each row the last call. A step that went back makes the history begin anew."""
        if self._steps and step <= self._steps[-1][0]:
            self._steps.clear()
        self._steps.append((step, left.last_calls()))
        while len(self._steps) > 1 and sum(tiles.num_bytes for _, tiles in self._steps) > self._max_bytes:
            self._steps.popleft()
        if self._steps[0][1].num_bytes > self._max_bytes:
            self._steps.clear()

    def before(self, step: int, row: int) -> list[tuple[int, TileStats]]:
        """What is known of a row from earlier steps, the oldest first."""
        return [
            (number, tiles.by_row[row][-1][1]) for number, tiles in self._steps if number < step and row in tiles.by_row
        ]
