"""Every promise of the pages was seen to be tested: broken on purpose, one at a time, in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import bugs, bugs_charts, bugs_flight, bugs_people, bugs_states, bugs_tiles
from support.planted import Bug, all_fit, seen_to_fail

BUGS = [*bugs.BUGS, *bugs_charts.BUGS, *bugs_flight.BUGS, *bugs_people.BUGS, *bugs_states.BUGS, *bugs_tiles.BUGS]


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
