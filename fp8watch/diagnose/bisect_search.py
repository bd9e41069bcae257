"""The fewest units that must leave FP8 for a failure to go: a search over prefixes of a ranking.

Shapes:     units in the order of suspicion, an oracle -> units
Thread:     the caller's

Leaving more units out of FP8 is taken to never bring a failure back. Then the last unit of the shortest prefix that
helps is needed, and with it set aside the search goes on among those before it. One culprit among n costs log2(n) + 1
trials; with a ranking, whose prefix is sought from its front, about 2·log2(its place) + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Helps = Callable[[frozenset[str]], bool]
"""Whether the failure is gone where these units are left out of FP8."""


def fewest(units: Sequence[str], helps: Helps, *, ranked: bool = False) -> list[str]:
    """Units of which none can be spared, the most suspected first.

    Args:
        units: those that help where all of them are left out, while nothing left out does not.
        helps: asked for sets that are neither of the two.
        ranked: the order means something: short prefixes are tried first.
    """
    found: list[str] = []
    rest = list(units)
    while rest:
        n = _shortest(rest, lambda k, rest=rest: helps(frozenset([*found, *rest[:k]])), ranked=ranked)  # type: ignore[misc]
        found.append(rest[n - 1])
        rest = rest[: n - 1]
        if rest and helps(frozenset(found)):
            break
    return sorted(found, key=list(units).index)


def _shortest(rest: Sequence[str], helps: Callable[[int], bool], *, ranked: bool) -> int:
    """Length of the shortest prefix that helps; the whole does, the empty one does not."""
    low, high = 0, len(rest)
    stride = 1
    while ranked and low + stride < high:
        if helps(low + stride):
            high = low + stride
            break
        low, stride = low + stride, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        if helps(middle):
            high = middle
        else:
            low = middle
    return high
