"""Every promise of the agent was broken once, and its test saw it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.bugs import BUGS
from planted import Bug, copy_of_tree, seen_to_fail, still_fits


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_tree(tmp_path_factory.mktemp("tree"))


def test_every_bug_still_fits_the_code() -> None:
    for bug in BUGS:
        still_fits(bug)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_the_bug_is_seen(bug: Bug, tree: Path) -> None:
    seen_to_fail(tree, bug)
