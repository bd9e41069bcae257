"""CI checks a part of other people's packages with each change: within the budget, in turn, and what is left out is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.planted_selection import Changed
from support.real_packages import ROOMS, STACKS, TE, choose, needs

ROOT = Path(__file__).parents[2]


def history(commit: int, *by_head: str) -> Changed:
    return Changed(f"{commit:040x}", frozenset(by_head), frozenset(), False, frozenset(by_head))


@pytest.mark.parametrize("name", ROOMS)
def test_a_part_keeps_within_the_budget_and_each_check_has_its_turn(name: str) -> None:
    room = ROOMS[name]
    turns = [choose(room, history(commit)) for commit in range(200)]
    assert {check for part in turns for check in part} == set(room.seconds)
    assert all(room.cost_s(part) <= room.budget_s for part in turns)
    assert all(set(room.always) <= set(part) for part in turns)
    assert turns == [choose(room, history(commit)) for commit in range(200)]
    assert min(len(part) for part in turns) >= 2


def test_the_oldest_and_the_newest_transformer_engine_are_in_every_part() -> None:
    script = (ROOT / "tests" / "te" / "real" / "run.sh").read_text()
    versions = re.search(r"versions=\(([\d. ]+)\)", script)[1].split()
    assert list(TE.seconds) == versions
    assert TE.always == (versions[0], versions[-1])
    assert len(choose(TE, history(1))) == 4


def test_an_adapter_that_changed_is_checked_on_its_package() -> None:
    for name in STACKS.seconds:
        for commit in range(20):
            assert name in choose(STACKS, history(commit, f"tests/stacks/check_{name}.py")), name
    assert "lightning" in choose(STACKS, history(3, "fp8watch/integrations/lightning.py"))


def test_every_check_is_in_the_table_and_says_what_it_needs() -> None:
    files = {path.stem.removeprefix("check_") for path in (ROOT / "tests" / "stacks").glob("check_*.py")}
    assert files == set(STACKS.seconds) == set(STACKS.needs)
    assert {package for packages in STACKS.needs.values() for package in packages} == set(STACKS.installing)
    with pytest.raises(ValueError, match="names no checks"):
        needs("wandb==0.31.0\n")


@pytest.mark.parametrize("name", ROOMS)
def test_what_is_left_out_is_named(name: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "real_packages.py", name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    taken = set(done.stdout.split())
    left = set(re.findall(r"  left out: (\S+) \(make test-", done.stderr))
    assert taken | left == set(ROOMS[name].seconds)
    assert not taken & left


def test_ci_runs_both_parts() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for name in ROOMS:
        assert f"make test-{name} ARGS=--part" in script
