"""Long tests that take long by themselves: with a change, those of what changed, and others in turn, within a budget.

`@pytest.mark.heavy(seconds, "fp8watch/kernels", ...)` says what a test takes on one core of a quiet machine, and which
files it rests on; it is `long` with that. `make test-long` runs all of them. Where FP8WATCH_COUNTS asks for a part, what is
taken fits into BUDGET_S: first the tests that rest on a file which the commit changed, or that changed themselves, then
those of the last commits, then the others. Among equals the commit chooses, so a run can be repeated, and the next one
takes others; `first=True` is for what every change of its files must run. What is left out is named at the end.

Heavy tests run before the other long ones: a worker that begins one when all others have ended keeps everybody waiting.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import counts
from support.planted import HEAVY_LAST
from support.planted_selection import Changed, changed

MARK = "heavy"
BUDGET_S = 300.0
"""Of one run, on one core; there are two."""
LIGHT_S = 2.0
"""What takes less is no heavy test."""
HANGS = 20.0
"""Times what it takes on a quiet machine: then a heavy test hangs, unless it says itself when."""


@dataclass(frozen=True)
class Heavy:
    """A test, what it takes, and the files and folders that it rests on."""

    name: str
    seconds: float
    files: tuple[str, ...]
    first: bool = False

    @classmethod
    def of(cls, name: str, mark: pytest.Mark) -> Heavy:
        """As its mark says."""
        seconds, *files = mark.args
        if not LIGHT_S <= seconds <= BUDGET_S:
            raise pytest.UsageError(
                f"{name}: heavy({seconds}): must be from {LIGHT_S:g} to {BUDGET_S:g} s; below, `long` is enough, and above "
                "it would never have its turn: split it"
            )
        return cls(name, float(seconds), tuple(files), **mark.kwargs)

    def rests_on(self, files: frozenset[str]) -> bool:
        """Whether any of these files is one of its own, or in one of its folders."""
        own = (*self.files, self.name.partition("::")[0])
        return any(file == path or file.startswith(f"{path}/") for path in own for file in files)


@dataclass(frozen=True)
class Choice:
    """The tests that are run, and the lines that say of how many, and which are left out."""

    names: frozenset[str]
    lines: tuple[str, ...]


def choose(tests: Sequence[Heavy], what: Changed | None, budget_s: float = BUDGET_S) -> Choice:
    """What fits into the budget."""
    commit = what.commit if what is not None else ""

    def turn(test: Heavy) -> str:
        return hashlib.sha256(f"{commit} {test.name}".encode()).hexdigest()

    def far(test: Heavy) -> int:
        if what is None or what.is_shallow:
            return 0
        near = (what.by_head, what.latest)
        return next((i for i, files in enumerate(near) if test.rests_on(files)), len(near))

    left, taken = budget_s, []
    for test in sorted(tests, key=lambda test: (far(test), not test.first, turn(test))):
        if test.seconds <= left:
            left -= test.seconds
            taken.append(test)
    names = frozenset(test.name for test in taken)
    total_s = sum(test.seconds for test in tests)
    head = f"heavy tests: {len(taken)} of {len(tests)}, {budget_s - left:.0f} of {total_s:.0f} s, "
    head += f"chosen by commit {commit[:9]}: " if commit else "without a git history to choose by: "
    head += (
        f"{sum(far(test) == 0 for test in taken)} of {sum(far(test) == 0 for test in tests)} on files that it changed"
    )
    out = [test.name for test in tests if test.name not in names]
    return Choice(names, (head, *(f"  left out: {name}" for name in out)))


def _heavy(item: pytest.Item) -> Heavy | None:
    mark = item.get_closest_marker(MARK)
    if mark is None or item.get_closest_marker("skip") is not None:  # that has not its turn by its own count
        return None
    return Heavy.of(item.nodeid, mark)


_said = pytest.StashKey[tuple[str, ...]]()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """What is heavy is long, and has longer than others before it counts as hanging; not where the first failure is waited for."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return
    item.add_marker(pytest.mark.long)
    usual_s = float(item.config.getini("timeout") or 0) if item.config.pluginmanager.hasplugin("timeout") else 0.0
    if usual_s < HANGS * mark.args[0] and item.get_closest_marker("timeout") is None and not os.environ.get(HEAVY_LAST):
        item.add_marker(pytest.mark.timeout(HANGS * mark.args[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not chosen, and begin with the files whose tests take longest; where the first failure is waited for
    (planted.py), with the tests that take shortest."""
    found = {item: heavy for item in items if (heavy := _heavy(item))}
    if not found:
        return
    if os.environ.get(HEAVY_LAST):
        items.sort(key=lambda item: found[item].seconds if item in found else 0)
        return
    if counts.one_in() > 1:
        choice = choose(list(found.values()), changed(config.rootpath))
        out = {item for item, heavy in found.items() if heavy.name not in choice.names}
        config.hook.pytest_deselected(items=list(out))
        config.stash[_said] = choice.lines
        items[:] = [item for item in items if item not in out]
    seconds: Counter[Path] = Counter()
    for item in items:
        if item in found:
            seconds[item.path] += found[item].seconds
    items.sort(key=lambda item: -seconds[item.path])  # stable: files and tests keep their order


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that writes."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[MARK] = session.config.stash.get(_said, ())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers chose the same."""
    if lines := getattr(node, "workeroutput", {}).get(MARK):
        node.config.stash[_said] = tuple(lines)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Nothing is left out in silence."""
    for line in config.stash.get(_said, ()):
        terminalreporter.write_line(line)
