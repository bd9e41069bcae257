"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantize.backends import USABLE
from support.planted import Bug, all_fit, seen_to_fail

F = "tests/house/test_sketch_fields.py"
IN_BACKENDS = f"{F}::test_a_field_that_a_backend_does_not_know_is_absent"
IN_THE_STORE = f"{F}::test_a_field_that_a_record_does_not_hold_is_absent_from_store_and_pages"
BUGS = [
    Bug("what one call of a record lacks is absent", "record:merge_measured",
        " & ~(lacking(into) | lacking(other)) if EVERY_CALL", " if EVERY_CALL", IN_BACKENDS),
    Bug("a record without calls takes nothing away", "record:lacking",
        "-(measured & int(Measured.COUNTS)) & ", "", IN_BACKENDS),
    Bug("a record without energies takes no gain away", "record:lacking",
        "-((measured >> 4) & 1) & ", "", f"{F}::test_a_group_of_full_statistics_is_asked_of_those_alone"),
    Bug("a later field lies behind what kernels write in one piece", "record:_layout",
        "(f for f in FIELDS if f not in later), *sorted(later", "FIELDS, *sorted(later[:0]", IN_BACKENDS),
    Bug("joined rows keep their padding", "record:_row_dtype",
        'members.append(("padding", f"V{8 - odd}"))', "pass", IN_BACKENDS),
    Bug("a field of a group that was not measured is not merged", "row_fold:sections",
        " if groups_of((name,)) & ~stats.measured == 0", "", IN_BACKENDS),
    Bug("what one rank lacks is absent from charts", "rank_merge:RankMerge._merge",
        "self._lacking[at] |= lacking(values)", "pass", IN_THE_STORE),
    Bug("what one rank lacks is unknown to detectors", "cross_rank_step:CrossRankStep._measured",
        "got &= ~partly[row]", "pass", IN_THE_STORE),
    Bug("the page of examples shows them", "docs/examples.md",
        '--8<-- "examples/ddp.py"', '--8 < --"examples/ddp.py"',
        "tests/house/test_docs.py::test_the_page_of_examples_shows_every_example"),
    Bug("the code of a stored column never changes", "record",
        '"largest tile amax; Inf where an element is", 3)', '"largest tile amax; Inf where an element is", 42)',
        f"{F}::test_no_field_lacks_anything"),
    Bug("heavy tests stay within their budget", "tests/support/heavy_tests.py",
        "if test.seconds <= left:", "if left > 0:",
        "tests/house/test_heavy_tests.py::test_those_on_changed_files_come_first_and_the_budget_is_never_exceeded"),
    Bug("a heavy test runs where its files changed", "tests/support/heavy_tests.py",
        "key=lambda test: (far(test), not test.first, turn(test))", "key=turn",
        "tests/house/test_heavy_tests.py::test_those_on_changed_files_come_first_and_the_budget_is_never_exceeded"),
    Bug("what every change of its files runs comes before what takes turns", "tests/support/heavy_tests.py",
        "(far(test), not test.first, turn(test))", "(far(test), turn(test))",
        "tests/house/test_heavy_tests.py::test_what_every_change_of_its_files_runs_comes_before_what_takes_turns"),
    Bug("a part of the checks on real packages keeps within its budget", "tests/support/real_packages.py",
        "if room.cost_s([*taken, name]) <= room.budget_s:", "if True:",
        "tests/house/test_real_packages.py::test_a_part_keeps_within_the_budget_and_each_check_has_its_turn"),
    Bug("an adapter that changed is checked on its package", "tests/support/real_packages.py",
        "return not rests_on(name), ", "return False, ",
        "tests/house/test_real_packages.py::test_an_adapter_that_changed_is_checked_on_its_package"),
    Bug("checks on real packages that are left out are named", "tests/support/real_packages.py",
        "for name in (name for name in room.seconds if name not in names):", "for name in ():",
        "tests/house/test_real_packages.py::test_what_is_left_out_is_named"),
]  # fmt: skip
if "cpu" in USABLE:
    BUGS.append(
        Bug(
            "what one call lacks is absent in the compiled backend",
            "fp8watch/kernels/cpu_source/fold.h",
            " & ~(lacking(a) | lacking(b))",
            "",
            f"{F}::test_a_field_that_the_compiled_backend_does_not_know_is_absent",
        )
    )


def test_every_planted_bug_still_fits() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
