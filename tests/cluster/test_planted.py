"""Every promise of the queue, of shards and of the way of broken batches was seen to fail with the promise broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.bugs import BUGS as OF_THE_QUEUE
from cluster.bugs_shards import SHARDS
from cluster.bugs_urgent import URGENT
from support.planted import Bug, all_fit, seen_to_fail

BUGS = OF_THE_QUEUE + SHARDS + URGENT


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
