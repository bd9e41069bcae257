"""Five seconds for a test of every change; what needs more is made faster, or marked `long`.

Counted is the processor time of a test's own phase: this process, and the children that the test has waited for. Others at
work on the same cores and caches make that longer by up to half, which is allowed on top, so that a test fails where it is
slow and not where the machine is busy. What children take is mostly the loading of their libraries, which takes two to four
times as long where memory is slow though arithmetic is not: of that more is allowed. A slower machine has as much longer: it
is measured where a test is over, in arithmetic alone. Memory, files and processes of a machine that CI borrows are slower by
factors that no arithmetic shows, and come and go within minutes: there a test has IN_CI times as long, since the limit is for
whoever writes a test, at their own machine. What a test spends waiting is bounded as well, far above, by the clock, and there
it has as many times as long as there are processes that want a core. Fixtures are set apart: whoever comes first pays for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any, NamedTuple

import pytest

OPTION = "time_budget_s"
BUSY = 1.5
"""Times the budget: what a test may take on a machine that others use."""
IN_CI = 4.0
"""Times that, where the variable CI is set."""
OF_CHILDREN = 0.4
"""What a second of a child counts."""
LOOP, LOOP_S = 200_000, 0.0125
"""Squares that are added up, and the seconds that a core takes whose seconds the budget is in."""
MAX_SLOWNESS = 3.0
CLOCK = 12
"""Seconds of the clock for one of the budget."""


class Spent(NamedTuple):
    """Seconds since some moment."""

    processor: float
    clock: float
    of_children: float = 0.0  # of the processor time

    def counted(self) -> float:
        """Seconds of the processor that are held against the budget."""
        return self.processor - (1.0 - OF_CHILDREN) * self.of_children


_elsewhere: list[float] = []


def add(processor_s: float) -> None:
    """Processor time that a test has spent in a process that is nobody's child here."""
    _elsewhere.append(processor_s)


def now() -> Spent:
    """Processor time of this process, of its children that have ended and of what was added, and the clock."""
    t = os.times()
    of_children = t.children_user + t.children_system
    return Spent(t.user + t.system + of_children + sum(_elsewhere), time.monotonic(), of_children)


def slowness() -> float:
    """How many times longer this machine takes now, 1 to MAX_SLOWNESS; the median of five tries."""
    took = []
    for _ in range(5):
        began, total = time.process_time(), 0
        for i in range(LOOP):
            total += i * i
        took.append(time.process_time() - began)
    return min(MAX_SLOWNESS, max(1.0, sorted(took)[2] / LOOP_S))


def crowd() -> float:
    """How many processes want a core, within the last minute; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) if hasattr(os, "getloadavg") else 1.0


def complaint(spent: Spent, budget_s: float) -> str | None:
    """What a test over its budget is told; None within it."""
    times = IN_CI if os.environ.get("CI") else 1.0
    most_s, clock_s = BUSY * budget_s * times, CLOCK * budget_s
    if spent.counted() > most_s and spent.counted() > most_s * slowness():
        children = f", {spent.of_children:.1f} of them its children" if spent.of_children >= 0.1 else ""
        what = (
            f"took {spent.processor:.1f} s of processor time{children}, and a test of every change has {budget_s:g} s"
        )
    elif spent.clock > clock_s * times and spent.clock > clock_s * crowd():
        what = f"took {spent.clock:.1f} s by the clock, and a test of every change has {clock_s:g} s"
    else:
        return None
    return f"{what}: make it faster, or mark it with pytest.mark.long (then it runs with `make test-long`)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(OPTION, "seconds for a test that is not marked long; 0 for no limit", default="0")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failure of the test itself comes first."""
    before = now()
    result = yield
    budget_s = float(item.config.getini(OPTION))
    if budget_s > 0 and item.get_closest_marker("long") is None:
        said = complaint(Spent(*(b - a for a, b in zip(before, now(), strict=True))), budget_s)
        if said is not None:
            pytest.fail(f"{item.nodeid} {said}", pytrace=False)
    return result
