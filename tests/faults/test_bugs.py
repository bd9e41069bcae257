"""Every promise of the agent was broken once, and its test saw it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.bugs import BUGS
from support.planted import Bug, all_fit, seen_to_fail


def test_every_bug_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_the_bug_is_seen(bug: Bug, tree: Path) -> None:
    seen_to_fail(tree, bug)
