"""Which planted bugs are run: all of them, or those of what changed lately and a share of the others that goes round.

FP8WATCH_PLANTED=changed takes the bugs whose file, or the file of whose test, changed within two days before the commit
that is checked out, and a tenth of the others; never more than MAX_BUGS. Those of the commit itself come first, then
those of the latest commits; a tenth that is many gives way to them. Which of many are taken follows from the commit
alone: a run is repeated exactly, and the next commit takes others. What is left out is said in one line at the end.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.planted import ROOT, Bug
from support.planted_place import file_of

VARIABLE = "FP8WATCH_PLANTED"
WINDOW_S = 2 * 24 * 3600
NUM_LATEST = 20
"""Commits whose bugs come first where there are too many."""
MAX_BUGS = 30
SHARE = 10
"""Of the bugs in what did not change, one in so many."""
MIN_SHARE = 6
"""Of the bugs that are run, at least one in so many is of what did not change, as far as a tenth of those goes."""
GIT_S = 60.0


@dataclass(frozen=True)
class Changed:
    """What the history says: files of the latest commits, and of the two days before the commit that is checked out."""

    commit: str
    latest: frozenset[str]
    lately: frozenset[str]
    is_shallow: bool  # the history is not there, so that everything may have changed
    by_head: frozenset[str] = frozenset()  # by the commit that is checked out, and what is not committed


@dataclass(frozen=True)
class Selection:
    """The bugs that are run, and the line that says of how many, and why these."""

    bugs: frozenset[Bug]
    line: str


def changed(root: Path = ROOT) -> Changed | None:
    """What changed in the tree of a folder; None where it is not a git repository."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=GIT_S, check=True
        )
        return done.stdout

    def files(*args: str) -> frozenset[str]:
        return frozenset(filter(None, git(*args, "--name-only", "--relative").splitlines()))

    try:
        commit, seconds = git("log", "-1", "--format=%H %ct").split()
        is_shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
        of_main = ["log", "--first-parent", "-m", "--format="]  # a merge is a change at the time it was merged
        by_head = files("diff", "HEAD") | files(*of_main, "-1")
        latest = by_head | files(*of_main, f"-{NUM_LATEST}")
        lately = files(*of_main, f"--since={int(seconds) - WINDOW_S}")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Changed(commit, latest, lately | latest, is_shallow, by_head)


def select(bugs: Sequence[Bug], what: Changed | None, max_bugs: int = MAX_BUGS, root: Path = ROOT) -> Selection:
    """The bugs to run for a change."""
    if what is None:
        return Selection(frozenset(bugs), f"all {len(bugs)}, because there is no git history to choose by")

    def turn(bug: Bug) -> str:
        return hashlib.sha256(f"{what.commit} {bug.at} {bug.promise}".encode()).hexdigest()

    def files(bug: Bug) -> set[str]:
        return {file_of(bug.at, bug.old, root), *(node.partition("::")[0] for node in bug.test.split())}

    in_turn = sorted(bugs, key=turn)
    if what.is_shallow:
        chosen = in_turn[:max_bugs]
        why = f"chosen by commit {what.commit[:9]}, whose history is not in this shallow clone"
        return Selection(frozenset(chosen), f"{len(chosen)} of {len(bugs)}, {why}")
    latest = [bug for bug in in_turn if files(bug) & what.latest]
    latest.sort(key=lambda bug: not files(bug) & what.by_head)  # stable: after a merge of much, what it brought
    lately = [bug for bug in in_turn if files(bug) & what.lately and not files(bug) & what.latest]
    others = [bug for bug in in_turn if not files(bug) & what.lately]
    share = others[: max(max_bugs - len(latest) - len(lately), min(-(-len(others) // SHARE), max_bugs // MIN_SHARE))]
    share = share[: -(-len(others) // SHARE)]
    near = [*latest, *lately][: max_bugs - len(share)]
    num_latest = len(set(near) & set(latest))
    line = (
        f"{len(near) + len(share)} of {len(bugs)}, chosen by commit {what.commit[:9]}: "
        f"{num_latest} of {len(latest)} in files of the last {NUM_LATEST} commits, "
        f"{len(near) - num_latest} of {len(lately)} in files of the last two days, "
        f"{len(share)} of {len(others)} in others (at most {max_bugs}; make test-long runs all)"
    )
    return Selection(frozenset([*near, *share]), line)


_said = pytest.StashKey[str]()


def _bug(item: pytest.Item) -> Bug | None:
    found = item.callspec.params.get("bug") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return found if isinstance(found, Bug) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the bugs that are not selected, among those that markers and names left in."""
    bugs = [bug for item in items if (bug := _bug(item))]
    mode = os.environ.get(VARIABLE) or "all"
    if mode not in ("all", "changed"):
        raise pytest.UsageError(f"{VARIABLE} is {mode!r}; it is 'all' or 'changed'")
    if not bugs:
        return
    selection = Selection(frozenset(bugs), f"all {len(bugs)}")
    if mode == "changed":
        selection = select(bugs, changed(config.rootpath))
        out = [item for item in items if (bug := _bug(item)) and bug not in selection.bugs]
        items[:] = [item for item in items if item not in set(out)]
        config.hook.pytest_deselected(items=out)
    config.stash[_said] = selection.line


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that writes."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None and _said in session.config.stash:
        output["planted"] = session.config.stash[_said]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers selected the same."""
    if line := getattr(node, "workeroutput", {}).get("planted"):
        node.config.stash[_said] = line


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Nothing is left out in silence."""
    if _said in config.stash:
        terminalreporter.write_line(f"planted bugs: {config.stash[_said]}")
