"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Bug, all_fit, seen_to_fail
from quantize.backends import USABLE

W = "tests/quantize/test_cpu_width.py"
BUGS = [
    Bug("the fastest width of vectors is compiled", "cpu_width:fastest_width",
        "width = min(times,", "width = max(times,",
        f"{W}::test_the_fastest_width_is_compiled_and_the_measurement_is_kept"),
    Bug("a measurement that fails costs the measurement only", "cpu_width:fastest_width",
        "except (Unavailable, OSError) as reason:", "except OSError as reason:",
        f"{W}::test_a_measurement_that_fails_leaves_the_widest_and_alarms_nobody"),
    Bug("a width that is asked for is taken", "cpu_width:fastest_width",
        'argument.startswith("-DVB=")', "False", f"{W}::test_a_width_that_is_asked_for_is_taken"),
]  # fmt: skip


def test_every_planted_bug_still_fits() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC")
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
