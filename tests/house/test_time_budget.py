"""A slow test of every change fails and is told what to do; a busy machine, fixtures and long tests are left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import time_budget
from support.time_budget import CLOCK, Spent, complaint

TESTS = Path(__file__).parents[1]
CASES = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 2.0: pass"  # a second of a child counts less

def burn():
    until = time.process_time() + 1.0
    while time.process_time() < until: pass

@pytest.fixture
def dear():
    burn()
    yield
    burn()

def test_quick(): pass
def test_slow(): burn()
def test_slow_child(): subprocess.run([sys.executable, "-c", BURN], check=True)
def test_waits(): time.sleep(0.4)
def test_waits_for_long(): time.sleep(2.0)
def test_dear_fixture(dear): pass
@pytest.mark.long
def test_long(): burn()
def test_wrong():
    burn()
    assert 1 == 2
"""


def outcomes(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """What became of each case, and all that was written."""
    (folder / "conftest.py").write_text(
        "from support import time_budget\nfrom support.time_budget import pytest_addoption, pytest_runtest_call\n"
        "time_budget.crowd = lambda: 1.0\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\ntime_budget_s = 0.15\nmarkers =\n    long: much\n")
    (folder / "test_cases.py").write_text(CASES)
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": ""}
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--color=no", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    lines = (line.removeprefix("test_cases.py::").split() for line in done.stdout.splitlines() if "%]" in line)
    return {words[0]: words[1] for words in lines}, done.stdout + done.stderr


def test_what_takes_too_long_fails_and_is_told_what_to_do(tmp_path: Path) -> None:
    found, text = outcomes(tmp_path)
    slow = {"test_slow", "test_slow_child", "test_waits_for_long", "test_wrong"}
    quick = {"test_quick", "test_waits", "test_dear_fixture", "test_long"}
    assert found == dict.fromkeys(slow, "FAILED") | dict.fromkeys(quick, "PASSED")
    assert "test_cases.py::test_slow took 1." in text
    assert re.search(r"test_waits_for_long took \d+\.\d s by the clock", text)
    assert "make it faster, or mark it with pytest.mark.long (then it runs with `make test-long`)" in text
    assert "assert 1 == 2" in text
    assert "test_wrong took" not in text


def test_the_limit_can_be_lifted(tmp_path: Path) -> None:
    found, _ = outcomes(tmp_path, "-o", "time_budget_s=0")
    assert [name for name, outcome in found.items() if outcome == "FAILED"] == ["test_wrong"]


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in CI too, and beside others."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(time_budget, "crowd", lambda: 1.0)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("processor", "clock", "is_over"),
    [
        (5.0, 5.0, False),
        (7.5, 7.6, False),
        (7.6, 7.7, True),
        (0.0, CLOCK * 5.0, False),
        (0.0, CLOCK * 5.0 + 0.1, True),
        (4.9, 59.0, False),
    ],
)
def test_a_busy_machine_has_twelve_times_as_long(
    monkeypatch: pytest.MonkeyPatch, processor: float, clock: float, is_over: bool
) -> None:
    monkeypatch.setattr(time_budget, "slowness", lambda: 1.0)
    assert (complaint(Spent(processor, clock), 5.0) is not None) == is_over


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(("of_children", "is_over"), [(10.0, False), (15.0, False), (20.0, True)])
def test_what_children_take_counts_less(monkeypatch: pytest.MonkeyPatch, of_children: float, is_over: bool) -> None:
    """They load their libraries; a test that is slow by itself is not excused by them."""
    monkeypatch.setattr(time_budget, "slowness", lambda: 1.0)
    told = complaint(Spent(of_children + 0.5, 20.0, of_children), 5.0)
    assert (told is not None) == is_over
    assert told is None or "20.5 s of processor time, 20.0 of them its children" in told
    assert complaint(Spent(of_children + 7.6, 20.0, of_children), 5.0) is not None


@pytest.mark.usefixtures("at_home")
def test_a_slower_machine_has_as_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_budget, "slowness", lambda: 2.0)
    assert complaint(Spent(14.9, 20.0), 5.0) is None
    assert complaint(Spent(15.1, 20.0), 5.0) is not None


@pytest.mark.usefixtures("at_home")
def test_where_many_want_a_core_the_clock_has_as_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_budget, "crowd", lambda: 3.0)
    assert complaint(Spent(4.0, 3 * CLOCK * 5.0), 5.0) is None
    assert complaint(Spent(4.0, 3 * CLOCK * 5.0 + 0.1), 5.0) is not None


@pytest.mark.usefixtures("at_home")
def test_a_machine_that_ci_borrows_has_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_budget, "slowness", lambda: 1.0)
    monkeypatch.setenv("CI", "true")
    assert complaint(Spent(29.9, 31.0), 5.0) is None
    assert complaint(Spent(30.1, 31.0), 5.0) is not None
    assert complaint(Spent(4.0, 4 * CLOCK * 5.0), 5.0) is None
    assert complaint(Spent(4.0, 4 * CLOCK * 5.0 + 0.1), 5.0) is not None


def test_every_change_is_held_to_it(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("time_budget_s")) <= 5
