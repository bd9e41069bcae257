"""Every promise of the pages was seen to be tested: broken on purpose, one at a time, in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser.bugs import BUGS
from planted import Bug, copy_of_tree, seen_to_fail, still_fits


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    for bug in BUGS:
        still_fits(bug)
    assert len({str(bug) for bug in BUGS}) == len(BUGS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_tree(tmp_path_factory.mktemp("planted"))


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
