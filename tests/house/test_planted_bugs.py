"""What breaks promises on purpose is itself kept to its promises: only a test that ran and failed has seen a bug."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.planted import Bug, _run, seen_to_fail, still_fits
from support.planted_fork import warmed
from support.planted_selection import NUM_LATEST, SHARE, changed, select

GOOD = "def double(x):\n    return 2 * x\n"
TEST = "from product import double\n\ndef test_double():\n    assert double(2) == 4\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree of one module with one test."""
    (tmp_path / "product.py").write_text(GOOD)
    (tmp_path / "test_product.py").write_text(TEST)
    return tmp_path


def bug(old: str, new: str, test: str = "test_product.py::test_double") -> Bug:
    return Bug("doubles", "product.py", old, new, test)


def unseen(tree: Path, planted: Bug, timeout_s: float = 60.0) -> str:
    with pytest.raises(AssertionError) as caught:
        seen_to_fail(tree, planted, timeout_s)
    return str(caught.value)


def test_a_bug_that_a_test_sees_is_seen_and_taken_out_again(small: Path) -> None:
    seen_to_fail(small, bug("2 * x", "3 * x"))
    assert (small / "product.py").read_text() == GOOD
    assert "pytest exits 0" in unseen(small, bug("2 * x", "x + 2"))  # what was broken before has left nothing behind
    seen_to_fail(small, bug("2 * x", "4 * x"))


def test_a_bug_that_is_no_python_does_not_fit(small: Path) -> None:
    """Every test of it would fail, whatever it looks at."""
    still_fits(bug("2 * x", "3 * x"), small)
    with pytest.raises(AssertionError, match=r"product\.py is no Python with this bug: .*line 2"):
        still_fits(bug("2 * x", "2 *"), small)


def test_a_bug_that_no_test_sees_is_told(small: Path) -> None:
    message = unseen(small, bug("2 * x", "x * 2"))
    assert "test_product.py::test_double does not see it (pytest exits 0)" in message
    assert "1 passed" in message
    assert (small / "product.py").read_text() == GOOD


@pytest.mark.parametrize(
    ("old", "new", "test", "status", "why"),
    [
        ("2 * x", "2 *", "test_product.py::test_double", 4, "SyntaxError"),
        ("def double", "def triple", "test_product.py::test_double", 4, "ImportError"),
        ("2 * x", "3 * x", "test_product.py::test_triple", 4, "not found"),
        ("2 * x", "__import__('os').kill(__import__('os').getpid(), 9)", "test_product.py::test_double", -9, ""),
    ],
    ids=["a syntax error", "a name that is gone", "a test that is gone", "a process that dies"],
)
def test_a_test_that_did_not_run_has_seen_nothing(
    small: Path, old: str, new: str, test: str, status: int, why: str
) -> None:
    message = unseen(small, bug(old, new, test))
    assert f"pytest exits {status}" in message
    assert why in message
    assert (small / "product.py").read_text() == GOOD


def is_alive(pid: int) -> bool:
    """Killed processes of others are reaped at some time soon."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_test_that_is_only_slow_has_seen_nothing(small: Path) -> None:
    hooks = "from support.time_budget import pytest_addoption, pytest_runtest_call"
    (small / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{hooks}\n")
    (small / "pytest.ini").write_text("[pytest]\ntime_budget_s = 0.01\n")
    message = unseen(small, bug("2 * x", "2 * max(x for _ in range(10**6))"))
    assert "test_product.py::test_double does not see it (pytest exits 0)" in message


ONE_LONG = """
import pytest
from product import double

@pytest.mark.heavy(60, "product.py")
def test_double_for_long():
    assert double(2) == 4

def test_double():
    assert double(2) == 4
"""


def test_the_tests_that_take_longest_run_last(small: Path) -> None:
    register = (
        "from support import heavy_tests\n\ndef pytest_configure(config): config.pluginmanager.register(heavy_tests)\n"
    )
    (small / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{register}"
    )
    (small / "pytest.ini").write_text("[pytest]\nmarkers =\n    heavy: x\n    long: x\n")
    (small / "test_product.py").write_text(ONE_LONG)
    (small / "product.py").write_text("def double(x):\n    return 3 * x\n")
    done = _run(small, bug("", "", "test_product.py"), 60.0)
    assert done.status == 1
    assert "test_double_for_long" not in done.text


CHILD = "__import__('subprocess').Popen(['sleep', '600'])"


def test_a_test_that_hangs_is_killed_with_all_it_started(small: Path) -> None:
    hang = f"(open('pid', 'w').write(str({CHILD}.pid)), __import__('time').sleep(600))"
    began = time.monotonic()
    warmed()
    message = unseen(small, bug("2 * x", hang), timeout_s=4.0)
    assert time.monotonic() - began < 200
    assert "runs for more than 4 s" in message
    assert (small / "product.py").read_text() == GOOD
    assert gone(int((small / "pid").read_text()))
    seen_to_fail(small, bug("2 * x", "3 * x"))  # the next one is not in its way


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    until = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)


def test_what_a_test_leaves_running_ends_with_it(small: Path) -> None:
    seen_to_fail(small, bug("2 * x", f"-open('pid', 'w').write(str({CHILD}.pid))"))
    assert gone(int((small / "pid").read_text()))


def test_a_test_runs_as_in_a_process_of_its_own(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8WATCH_RUN", "of the host")
    monkeypatch.setenv("SEEN_BY_TESTS", "yes")
    ignored = (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )  # as in the background of a shell, and then in all children
    interrupt = "SIG_IGN" if ignored else "default_int_handler"
    (small / "test_product.py").write_text(
        "import atexit, os, pathlib, signal, subprocess, sys, threading\n"
        "import product\n"
        "def test_double():\n"
        "    assert os.getcwd() == str(pathlib.Path(__file__).parent)\n"
        "    assert product.__file__ == os.path.join(os.getcwd(), 'product.py')\n"
        "    assert 'FP8WATCH_RUN' not in os.environ and os.environ['SEEN_BY_TESTS'] == 'yes'\n"
        "    assert not [name for name in sys.modules if name.startswith('fp8watch')]\n"
        "    assert sys.modules['__main__'].__spec__.name == 'pytest.__main__'\n"
        "    assert threading.active_count() == 1 and os.getpgrp() == os.getpid()\n"
        f"    assert signal.getsignal(signal.SIGINT) is signal.{interrupt}\n"
        "    code = 'import product; print(product.__file__)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == product.__file__\n"
        "    atexit.register(pathlib.Path('ended').write_text, 'yes')\n"
        "    threading.Timer(0.2, pathlib.Path('waited').write_text, ['yes']).start()\n"
    )
    assert "pytest exits 0" in unseen(small, bug("2 * x", "3 * x"))
    assert (small / "ended").read_text() == (small / "waited").read_text() == "yes"


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., None]:
    """Commits files, so many days after the first; the folder is the repository."""

    def commit(day: float, *names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"{day}")
        seconds = f"{1_700_000_000 + int(day * 86_400)} +0000"
        who = {f"GIT_{role}_{what}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = {**os.environ, **who, "GIT_AUTHOR_DATE": seconds, "GIT_COMMITTER_DATE": seconds}
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "c", "--allow-empty"]):
            subprocess.run(["git", *command], cwd=tmp_path, env=env, check=True)

    return commit


def bugs_of(*paths: str, each: int = 1) -> list[Bug]:
    return [Bug(f"{path} {i}", path, "", "", f"test_{path}::test_it") for path in paths for i in range(each)]


def aged(commit: Callable[..., None]) -> None:
    """Files of three ages: before the two days, within them, of the latest commits."""
    commit(0, "old.py", "seen.py", "lately.py", "latest.py")
    commit(8.5, "lately.py")
    commit(8.6, "test_seen.py")
    for i in range(NUM_LATEST):
        commit(10 + i / 1000, "latest.py")


def test_bugs_of_what_changed_are_run_and_a_tenth_of_the_others(
    repository: Callable[..., None], tmp_path: Path
) -> None:
    aged(repository)
    bugs = bugs_of("latest.py", "lately.py", "seen.py") + bugs_of("old.py", each=25)
    chosen = select(bugs, changed(tmp_path))
    assert {b for b in chosen.bugs if b.at != "old.py"} == set(bugs[:3])  # `seen.py` is the same, its test is not
    assert len(chosen.bugs) == 3 + 3
    assert chosen.line.startswith("6 of 28, chosen by commit ")
    assert f"1 of 1 in files of the last {NUM_LATEST} commits" in chosen.line
    assert "2 of 2 in files of the last two days, 3 of 25 in others" in chosen.line


def test_what_is_not_committed_is_the_latest_change(repository: Callable[..., None], tmp_path: Path) -> None:
    aged(repository)
    (tmp_path / "old.py").write_text("edited")
    assert select(bugs_of("old.py", each=25), changed(tmp_path)).bugs == set(bugs_of("old.py", each=25))


def test_too_many_are_cut_and_the_line_says_so(repository: Callable[..., None], tmp_path: Path) -> None:
    aged(repository)
    bugs = bugs_of("lately.py", each=30) + bugs_of("latest.py", each=8) + bugs_of("old.py", each=10)
    chosen = select(bugs, changed(tmp_path), max_bugs=20)
    assert len(chosen.bugs) == 20
    assert set(bugs_of("latest.py", each=8)) < chosen.bugs
    assert "8 of 8 in" in chosen.line
    assert "11 of 30 in files of the last two days, 1 of 10 in others (at most 20;" in chosen.line


def test_what_the_commit_itself_changed_comes_first(repository: Callable[..., None], tmp_path: Path) -> None:
    aged(repository)
    repository(10.5, "head.py")
    bugs = bugs_of("latest.py", each=200) + bugs_of("head.py", each=12) + bugs_of("old.py", each=90)
    chosen = select(bugs, changed(tmp_path), max_bugs=18)
    assert set(bugs_of("head.py", each=12)) < chosen.bugs
    assert "15 of 212 in files of the last" in chosen.line
    assert "3 of 90 in others (at most 18;" in chosen.line


def test_a_commit_always_chooses_the_same_and_others_choose_others(
    repository: Callable[..., None], tmp_path: Path
) -> None:
    aged(repository)
    bugs = bugs_of("old.py", each=40)
    first = select(bugs, changed(tmp_path))
    assert select(bugs[::-1], changed(tmp_path)) == first
    repository(11, "new.py")
    next_one = select(bugs, what := changed(tmp_path))
    assert next_one.bugs != first.bugs
    seen = set(next_one.bugs)
    for i in range(80):
        chosen = select(bugs, replace(what, commit=f"{i:040x}")).bugs
        assert len(chosen) == 40 // SHARE
        seen |= chosen
    assert seen == set(bugs)


def test_the_clock_plays_no_part(repository: Callable[..., None], tmp_path: Path) -> None:
    repository(0, "old.py")  # in 2023
    repository(1, "new.py")
    what = changed(tmp_path)
    assert what is not None
    assert what.lately == {"old.py", "new.py"}


def test_without_its_history_a_commit_chooses_among_all(repository: Callable[..., None], tmp_path: Path) -> None:
    aged(repository)
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tmp_path}", str(shallow)], check=True)
    bugs = bugs_of("old.py", each=30)
    chosen = select(bugs, changed(shallow), max_bugs=20)
    assert len(chosen.bugs) == 20
    assert "20 of 30" in chosen.line
    assert "not in this shallow clone" in chosen.line


def test_without_git_all_are_run(tmp_path: Path) -> None:
    bugs = bugs_of("old.py", each=30)
    chosen = select(bugs, changed(tmp_path))
    assert chosen.bugs == set(bugs)
    assert "all 30, because there is no git history" in chosen.line


CHANGED = ("changed", 4, "planted bugs: 3 of 25, chosen by commit")


@pytest.mark.parametrize(
    ("workers", "mode", "num_left", "said"), [("0", *CHANGED), ("2", *CHANGED), ("0", "all", 26, "bugs: all 25\n")]
)
def test_a_run_says_what_it_left_out(
    repository: Callable[..., None], tmp_path: Path, workers: str, mode: str, num_left: int, said: str
) -> None:
    (tmp_path / "conftest.py").write_text("from support.planted_selection import *\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from support.planted import Bug\n"
        "@pytest.mark.parametrize('bug', [Bug(f'p{i}', 'old.py', '', '', 'old.py') for i in range(25)], ids=str)\n"
        "def test_it(bug): pass\n"
        "def test_other(): pass\n"
    )
    aged(repository)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", workers, "-p", "no:cacheprovider"]
    path = os.pathsep.join(str(Path(__file__).parents[i] / name) for i, name in ((1, ""), (2, "server"), (2, "agent")))
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FP8WATCH_PLANTED": mode}
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120).stdout
    assert f"{num_left} passed" in out
    assert out.count(said) == 1, out


def test_a_word_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from support.planted_selection import *\n")
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    path = os.pathsep.join(str(Path(__file__).parents[i] / name) for i, name in ((1, ""), (2, "server"), (2, "agent")))
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FP8WATCH_PLANTED": "some"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "FP8WATCH_PLANTED is 'some'; it is 'all' or 'changed'" in done.stdout + done.stderr


def test_every_table_of_bugs_is_run() -> None:
    """A table of a room that no test there imports would be broken in silence."""
    rooms = Path(__file__).parents[1]
    tables = sorted(rooms.glob("*/bugs*.py"))
    assert len(tables) >= 11
    for table in tables:
        others = [path for path in table.parent.glob("*.py") if path != table and "BUGS" in path.read_text()]
        imports = [line for path in others for line in path.read_text().splitlines() if line.startswith("from ")]
        assert any(table.stem in re.split(r"\W+", line) for line in imports), f"nothing runs the bugs of {table.name}"
