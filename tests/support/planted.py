"""Bugs put in on purpose, one at a time, into a copy of the tree: the test that is named with each must see it.

A promise whose test has never failed has not been tested. The list of a room is data beside its tests; that every bug
still fits the code is checked with every change, that it is seen with the long tests.
"""

from __future__ import annotations

import itertools
import os
import shutil
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import database
from support.planted_fork import Ended, warmed
from support.planted_place import find

ROOT = Path(__file__).parents[2]
COPIED = ("agent", "server", "fp8watch", "tests", "dashboards", "docs", "examples", "pyproject.toml", "README.md")
COPIED += ("deploy", "Dockerfile", "docker-compose.yml", "Makefile", ".dockerignore")
TESTS_FAILED = 1
"""Exit status of pytest when tests ran and failed; everything else means that they did not run."""
PASSED_ON = ("FP8WATCH_TEST_DATABASE_URL", "FP8WATCH_CHROMIUM")
NOT_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "CI", "BUILD_NUMBER")
"""Under CI pytest explains a failed `==` line by line: minutes for long lists, and here a failure is what is wanted."""
HEAVY_LAST = "FP8WATCH_HEAVY_LAST"
_ticks = itertools.count(1)


@dataclass(frozen=True)
class Bug:
    """`old` stands once at a place of the product; with `new` instead of it, `test` fails."""

    promise: str
    at: str  # module:function (planted_place.py), or the path of what is not Python
    old: str
    new: str
    test: str  # node id; several, apart by spaces: one of them at least must fail

    def __str__(self) -> str:
        return self.promise.replace(" ", "-").replace(",", "")


def still_fits(bug: Bug, root: Path = ROOT) -> None:
    """The code that the bug goes into is there, once, and so is the file of its test; what it becomes is code, or no test would
    have seen anything but that it is none."""
    place = find(bug.at, bug.old, root)
    if place.path.suffix == ".py":
        try:
            _parses(textwrap.dedent(place.text().replace(bug.old, bug.new, 1)))
        except SyntaxError as error:
            raise AssertionError(f"{bug.at} is no Python with this bug: {error}") from error
    for node in bug.test.split():
        path, _, name = node.partition("::")
        text = (root / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text, f"{path} has no test {name!r}"


def _parses(text: str) -> None:
    """Raises SyntaxError for what is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        compile(text, "<planted>", "exec", dont_inherit=True)


def all_fit(bugs: Sequence[Bug]) -> None:
    """Every bug of a room still fits, and no two are called the same."""
    for bug in bugs:
        still_fits(bug)
    assert len({str(bug) for bug in bugs}) == len(bugs)


def copy_of_tree(folder: Path) -> Path:
    """A copy that may be broken."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def seen_to_fail(tree: Path, bug: Bug, timeout_s: float = 240.0) -> None:
    """Put the bug in, run its test in the copy, and take it out again."""
    place = find(bug.at, bug.old, tree)
    path, good = place.path, place.path.read_text()
    _write(path, good[: place.start] + place.text().replace(bug.old, bug.new, 1) + good[place.end :])
    try:
        done = _run(tree, bug, timeout_s)
    finally:
        _write(path, good)
    if done.status == TESTS_FAILED:
        return
    how = f"runs for more than {timeout_s:g} s" if done.status is None else f"pytest exits {done.status}"
    tail = "\n".join(done.text.splitlines()[-30:])
    raise AssertionError(f"{bug.test} does not see it ({how}):\n{tail}")


def _write(path: Path, text: str) -> None:
    """Compiled code is told from older by size and whole seconds: every version has a second of its own."""
    path.write_text(text)
    made = path.stat().st_mtime + 2 * next(_ticks)
    os.utime(path, (made, made))


def _run(tree: Path, bug: Bug, timeout_s: float) -> Ended:
    env = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH_") and k not in NOT_PASSED_ON}
    env |= {k: v for k, v in os.environ.items() if k in PASSED_ON}
    env["FP8WATCH_TEST_DATABASE_URL"] = database.postgresql_server()  # one for all bugs: a start takes seconds
    env[HEAVY_LAST] = "yes"  # a bug that is seen early is seen in time
    env["PYTHONPATH"] = os.pathsep.join(str(tree / name) for name in ("tests", "server", "agent", "."))
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time goes into plugins that no test here needs
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-o", "timeout=120", "-m", ""]
    options += ["-o", "time_budget_s=0"]  # a test that is slow has not seen anything
    return warmed().pytest([*options, *bug.test.split()], tree, env, timeout_s)
