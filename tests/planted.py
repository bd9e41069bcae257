"""Bugs put in on purpose, one at a time, into a copy of the tree: the test that is named with each must see it.

A promise whose test has never failed has not been tested. The list of a room is data beside its tests; that every bug
still fits the code is checked with every change, that it is seen with the long tests.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("agent", "server", "fp8watch", "tests", "dashboards", "docs", "examples", "pyproject.toml", "README.md")
COPIED += ("Dockerfile", "docker-compose.yml", "Makefile", ".dockerignore")
TESTS_FAILED = 1
"""Exit status of pytest when tests ran and failed; everything else means that they did not run."""
NOT_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "CI", "BUILD_NUMBER")
"""Under CI pytest explains a failed `==` line by line: minutes for long lists, and here a failure is what is wanted."""
_ticks = itertools.count(1)


@dataclass(frozen=True)
class Bug:
    """`old` stands once in the file `path`; with `new` in its place, `test` fails."""

    promise: str
    path: str
    old: str
    new: str
    test: str  # node id; several, apart by spaces: one of them at least must fail

    def __str__(self) -> str:
        return self.promise.replace(" ", "-").replace(",", "")


def still_fits(bug: Bug, root: Path = ROOT) -> None:
    """The code that the bug goes into is there, once, and so is the file of its test."""
    found = (root / bug.path).read_text().count(bug.old)
    assert found == 1, f"{bug.path} holds what the bug replaces {found} times; put it where the code has gone"
    for node in bug.test.split():
        path, _, name = node.partition("::")
        text = (root / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text, f"{path} has no test {name!r}"


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
    path = tree / bug.path
    good = path.read_text()
    _write(path, good.replace(bug.old, bug.new, 1))
    try:
        done = _run(tree, bug, timeout_s)
    finally:
        _write(path, good)
    tail = "\n".join(done.stdout.splitlines()[-30:])
    assert done.returncode == TESTS_FAILED, f"{bug.test} does not see it (pytest exits {done.returncode}):\n{tail}"


def _write(path: Path, text: str) -> None:
    """Compiled code is told from older by size and whole seconds: every version has a second of its own."""
    path.write_text(text)
    made = path.stat().st_mtime + 2 * next(_ticks)
    os.utime(path, (made, made))


def _run(tree: Path, bug: Bug, timeout_s: float) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH_") and k not in NOT_PASSED_ON}
    if "FP8WATCH_TEST_DATABASE_URL" in os.environ:
        env["FP8WATCH_TEST_DATABASE_URL"] = os.environ["FP8WATCH_TEST_DATABASE_URL"]
    env["PYTHONPATH"] = os.pathsep.join(str(tree / name) for name in ("tests", "server", "agent", "."))
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time goes into plugins that no test here needs
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    command += ["-o", "timeout=120", "-m", "", *bug.test.split()]
    return subprocess.run(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
