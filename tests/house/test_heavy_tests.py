"""Of the tests that take long a change runs those on its files, then others in turn, and never more than the budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.heavy_tests import BUDGET_S, Heavy, choose
from support.planted_selection import Changed

TESTS = Path(__file__).parents[1]
FILE = """
import pytest

@pytest.mark.heavy(60, "kernels")
def test_on_kernels(): pass

@pytest.mark.heavy(50, "store")
def test_on_the_store(): pass

@pytest.mark.long
def test_long(): pass

def test_of_every_change(): pass
"""
CONFTEST = """
from support import heavy_tests
from support.counts import pytest_report_header

def pytest_configure(config):
    config.addinivalue_line("markers", "long: x")
    config.addinivalue_line("markers", "heavy(seconds, *files): x")
    config.pluginmanager.register(heavy_tests, "heavy")
    heavy_tests.BUDGET_S = 100.0
    heavy_tests.choose.__defaults__ = (100.0,)
"""


def history(commit: int, *by_head: str, latest: tuple[str, ...] = ()) -> Changed:
    return Changed(f"{commit:040x}", frozenset({*by_head, *latest}), frozenset(), False, frozenset(by_head))


def heavies(num: int, seconds: float, *of: str) -> list[Heavy]:
    return [Heavy(f"tests/{'-'.join(of)}/test_{i}.py::test_it", seconds, of) for i in range(num)]


def test_those_on_changed_files_come_first_and_the_budget_is_never_exceeded() -> None:
    near, later, far = heavies(3, 40, "fp8watch/kernels"), heavies(3, 40, "server/store"), heavies(30, 30, "docs")
    what = history(1, "fp8watch/kernels/cpu.py", latest=("server/store/compact.py",))
    taken = choose([*far, *later, *near], what, 200).names
    assert {t.name for t in near} < taken
    assert len({t.name for t in later} & taken) == 2
    assert not {t.name for t in far} & taken
    for commit in range(30):
        chosen = choose([*far, *later, *near], history(commit), 200).names
        assert sum(t.seconds for t in [*far, *later, *near] if t.name in chosen) <= 200


def test_a_test_that_changed_itself_runs() -> None:
    others, (own,) = heavies(20, 30, "docs"), heavies(1, 30, "fp8watch/session")
    assert own.name in choose([*others, own], history(1, own.name.partition("::")[0]), 60).names


def test_each_has_its_turn_and_a_commit_has_always_the_same() -> None:
    every = heavies(20, 30, "docs")
    turns = [choose(every, history(commit), 60).names for commit in range(100)]
    assert frozenset().union(*turns) == {t.name for t in every}
    assert turns == [choose(every, history(commit), 60).names for commit in range(100)]


def test_what_is_left_out_is_named() -> None:
    every = heavies(3, 40, "docs")
    head, *out = choose(every, history(1), 100).lines
    assert head.startswith("heavy tests: 2 of 3, 80 of 120 s, chosen by commit 000000000: ")
    assert [line.removeprefix("  left out: ") for line in out] == [
        t.name for t in every if t.name not in choose(every, history(1), 100).names
    ]
    assert choose(every, None, 1000).lines == (
        "heavy tests: 3 of 3, 120 of 120 s, without a git history to choose by: 3 of 3 on files that it changed",
    )


def run(folder: Path, *args: str, **environ: str) -> str:
    (folder / "test_it.py").write_text(FILE)
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *args, "test_it.py"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def test_heavy_is_long_and_in_full_unless_a_part_is_asked_for(tmp_path: Path) -> None:
    assert "1 passed, 3 deselected" in run(tmp_path, "-m", "not long")
    in_full = run(tmp_path, "-m", "long")
    assert "3 passed, 1 deselected" in in_full
    assert "heavy tests" not in in_full
    part = run(tmp_path, "-m", "long", FP8WATCH_COUNTS="5")
    assert "2 passed, 2 deselected" in part
    assert "heavy tests: 1 of 2, " in part
    assert "  left out: test_it.py::test_on_" in part


@pytest.mark.parametrize("seconds", [1, BUDGET_S + 1])
def test_what_would_never_have_its_turn_is_refused(seconds: float) -> None:
    with pytest.raises(pytest.UsageError, match="split it"):
        Heavy.of("test_it.py::test_it", pytest.mark.heavy(seconds, "docs").mark)


def test_what_every_change_of_its_files_runs_comes_before_what_takes_turns() -> None:
    kernels = heavies(9, 40, "fp8watch/kernels")
    first = Heavy.of("tests/a.py::test_it", pytest.mark.heavy(30, "fp8watch/kernels", first=True).mark)
    for commit in range(20):
        assert first.name in choose([*kernels, first], history(commit, "fp8watch/kernels/cpu.py"), 100).names
