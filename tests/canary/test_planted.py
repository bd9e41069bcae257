"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from canary.bugs import BUGS
from support.planted import Bug, all_fit, seen_to_fail


def test_every_bug_still_fits() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_seen(bug: Bug, tree) -> None:
    seen_to_fail(tree, bug)
