"""How often a long test repeats itself: in full, or one time in so many where FP8WATCH_COUNTS says so.

`make test-long` runs in full. CI runs a part with every change, so that it ends within the hour; which of several cases
are part of it follows from the commit that is checked out, so that all have their turn.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import pytest
from support.planted_selection import changed

VARIABLE = "FP8WATCH_COUNTS"


def one_in() -> int:
    """1 for the full counts."""
    given = os.environ.get(VARIABLE) or "1"
    if not given.isdecimal() or int(given) < 1:
        raise pytest.UsageError(f"{VARIABLE} is {given!r}; it is 1 for the full counts, or 5 for a fifth of them")
    return int(given)


def part_of(count: int) -> int:
    """Of so many repetitions, those that are run now."""
    return -(-count // one_in())


@lru_cache(maxsize=1)
def _commit() -> str:
    what = changed()
    return what.commit if what is not None else ""


def _wait(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason=f"{VARIABLE}={one_in()}: {why}; make test-long runs it")


def in_turn(cases: Iterable[Any], *marks: pytest.MarkDecorator) -> list[Any]:
    """All cases for the parameters of a long test; one that has to wait for its turn is skipped, and says so."""
    found: Sequence[Any] = list(cases)
    runs = sorted(found, key=lambda case: hashlib.sha256(f"{_commit()} {case}".encode()).hexdigest())
    runs = runs[: part_of(len(found))]
    wait = _wait("not its turn at this commit")
    return [pytest.param(case, marks=marks if case in runs else (*marks, wait)) for case in found]


def in_full(case: Any, *marks: pytest.MarkDecorator) -> Any:
    """A case that is worth its time with the full counts alone."""
    return pytest.param(case, marks=(*marks, _wait("only with the full counts")) if one_in() > 1 else marks)


def pytest_report_header() -> str | None:
    """Nothing is cut short in silence."""
    if one_in() == 1:
        return None
    return f"long tests: one in {one_in()} of their counts ({VARIABLE}); make test-long runs them in full"
