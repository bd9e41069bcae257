"""A field of the sketch: complete wherever it is known, and absent wherever it is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from house import field_gaps
from house.field_gaps import all_gaps, gaps
from quantize.backends import USABLE

from fp8watch_agent.record import EVERY_CALL, FIELD_BY_NAME, FIELDS, HISTOGRAMS, Measured, merge_measured
from fp8watch_server.store import blocks

ROOT = Path(__file__).parents[2]
ROOMS = ("quantize/test_slab.py", "quantize/test_statistics.py", "quantize/test_conformance.py", "agent/test_wire.py",
         "store/test_compaction.py", "store/test_api.py", "te/test_observer.py", "attach/test_probes.py")  # fmt: skip


def test_no_field_lacks_anything() -> None:
    missing = all_gaps()
    assert not missing, "\n".join(missing)


def test_codes_of_columns_are_unique_and_a_byte() -> None:
    assert len(set(blocks.CODES.values())) == len(blocks.CODES) == len(FIELDS) - len(HISTOGRAMS) + len(blocks.OWN_CODES)
    assert len(set(blocks.HISTOGRAM_CODES.values())) == len(HISTOGRAMS)
    assert all(0 <= code <= 255 for code in (*blocks.CODES.values(), *blocks.HISTOGRAM_CODES.values()))


def test_a_new_field_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    new = replace(FIELD_BY_NAME["num_inf"], name="num_new", group=Measured.COUNTS, code=41)
    assert gaps(new) == [
        "field num_new: tests/house/released_fields.py does not freeze its code: add \"num_new\": (41, 'COUNTS')",
        "field num_new: docs/glossary.md does not name it",
        "field num_new: backends that do not know it set its group COUNTS, and would report 0 as measured: give it a bit "
        "of Measured above CAST",
    ]
    monkeypatch.setattr(field_gaps, "EVERY_CALL", EVERY_CALL | Measured.HASH)  # any bit that no quantiser sets
    monkeypatch.setattr(field_gaps, "USABLE", ("reference",))
    assert gaps(replace(new, group=Measured.HASH))[2:] == [
        "field num_new: tests/quantize/oracle.py does not count it: nothing says what is right",
        "field num_new: backend reference does not fill it: fill it there, or name reference in NOT_FILLED",
        "field num_new: pages have no label: give it one in FIELDS",
    ]
    claimed = replace(FIELD_BY_NAME["num_nan"], name="num_nonzero", group=Measured.COUNTS)
    monkeypatch.setattr(field_gaps, "EVERY_CALL", Measured.COUNTS)
    monkeypatch.setattr(field_gaps, "_sketch_by", lambda backend: {"measured": 1, "num_nonzero": 0})
    assert any("backend reference says 0, tests/quantize/oracle.py says " in sentence for sentence in gaps(claimed))


def test_a_code_that_changed_is_named() -> None:
    moved = replace(FIELD_BY_NAME["num_inf"], code=12)
    (sentence,) = gaps(moved)
    assert sentence == (
        "field num_inf: it is (12, 'COUNTS|CAST'), and stored blocks know it as (14, 'COUNTS|CAST'): put that back"
    )


def test_a_group_of_full_statistics_is_asked_of_those_alone() -> None:
    light, full = int(Measured.COUNTS | Measured.AMAX), int(Measured.COUNTS | Measured.ENERGIES)
    gain = int(Measured.GAIN)
    assert merge_measured(light, full | gain) & gain  # micro-batches and ranks of which some have a full sample
    assert merge_measured(full | gain, light) & gain
    assert not merge_measured(full, full | gain) & gain  # energies of a backend that does not know it
    assert not merge_measured(full | gain, full) & gain
    assert merge_measured(0, full | gain) & gain


def with_a_later_field(*tests: str) -> str:
    """Run tests in a process whose table has a field that nobody knows."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "agent", "server", "tests"))
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "house.later_field",
        "-m",
        "not long",
    ]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def passed(said: str, least: int) -> None:
    found = re.search(r"(\d+) passed", said)
    assert found is not None, said
    assert int(found[1]) >= least, said
    assert "skipped" not in said, said


@pytest.mark.long  # a process that imports torch: up to ten seconds of processor time where nothing of it is cached
def test_a_field_that_a_backend_does_not_know_is_absent() -> None:
    passed(with_a_later_field("tests/house/later/test_in_backends.py", "-k", "not cpu"), 5)  # nothing to compile


@pytest.mark.heavy(6, "agent/fp8watch_agent/record.py", "server/fp8watch_server/store", first=True)
def test_a_field_that_a_record_does_not_hold_is_absent_from_store_and_pages() -> None:
    passed(with_a_later_field("tests/house/later/test_in_the_store.py"), 11)


@pytest.mark.long
@pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC")
def test_a_field_that_the_compiled_backend_does_not_know_is_absent() -> None:
    passed(with_a_later_field("tests/house/later/test_in_backends.py", "-k", "cpu"), 2)


@pytest.mark.heavy(45, "agent/fp8watch_agent/record.py", "fp8watch/sketch", "fp8watch/numerics/row_fold.py")
@pytest.mark.timeout(600)
def test_whole_rooms_pass_with_a_field_that_no_backend_knows() -> None:
    with_a_later_field(*(f"tests/{room}" for room in ROOMS))
