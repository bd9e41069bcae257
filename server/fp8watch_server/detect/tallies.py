"""Numbers of many ranks, of which the largest and the smallest are asked for with each batch.

Shapes:     key -> number; how many keys have each number
Thread:     detect worker

Ranks are many and their numbers few: steps that ranks have reached lie close together. So the numbers are counted, and a
question costs as much as there are different ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Tally:
    """The latest number of each key."""

    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}
        self._num: dict[int, int] = {}

    def put(self, key: Hashable, number: int) -> None:
        """A key has this number from now on."""
        before = self._of.get(key)
        if before == number:
            return
        if before is not None:
            self._less(before)
        self._of[key] = number
        self._num[number] = self._num.get(number, 0) + 1

    def drop(self, key: Hashable) -> None:
        """A key is no more."""
        before = self._of.pop(key, None)
        if before is not None:
            self._less(before)

    def _less(self, number: int) -> None:
        self._num[number] -= 1
        if not self._num[number]:
            del self._num[number]

    def clear(self) -> None:
        """No key has a number."""
        self._of.clear()
        self._num.clear()

    @property
    def numbers(self) -> Iterable[int]:
        """Those that a key has, each once."""
        return self._num.keys()


class Seen:
    """Sequence numbers of one session, kept as ranges: most come one after the other.

    Args:
        max_ranges: beyond it the lowest are forgotten.
    """

    def __init__(self, max_ranges: int = 64) -> None:
        self.ranges: list[list[int]] = []  # ascending, [first, last], apart
        self.max_ranges = max_ranges

    def add(self, number: int) -> bool:
        """Whether a number is new."""
        at = len(self.ranges)
        while at and self.ranges[at - 1][0] > number:
            at -= 1
        before = self.ranges[at - 1] if at else None
        if before is not None and number <= before[1]:
            return False
        after = self.ranges[at] if at < len(self.ranges) else None
        joins_before = before is not None and before[1] + 1 == number
        joins_after = after is not None and after[0] - 1 == number
        if before is not None and joins_before:
            before[1] = number
            if after is not None and joins_after:
                before[1] = after[1]
                del self.ranges[at]
        elif after is not None and joins_after:
            after[0] = number
        else:
            self.ranges.insert(at, [number, number])
            if len(self.ranges) > self.max_ranges:
                del self.ranges[0]
        return True
