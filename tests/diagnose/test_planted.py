"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from diagnose.bugs_checkpoints import BISECT_BUGS, CHECKPOINT_BUGS, FIX_BUGS
from planted import all_fit, seen_to_fail

BUGS = [*CHECKPOINT_BUGS, *BISECT_BUGS, *FIX_BUGS]


def test_every_planted_bug_still_fits():
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree, bug):
    seen_to_fail(tree, bug)
