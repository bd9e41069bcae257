"""The counts of the long tests are cut only where somebody asks for it, and what is left out is named."""

from __future__ import annotations

from typing import Any

import pytest
from support import counts


def run_now(params: list[Any]) -> list[Any]:
    return [p.values[0] for p in params if not any(mark.name == "skip" for mark in p.marks)]


@pytest.fixture
def a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(counts.VARIABLE, "5")


def test_counts_are_full_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(counts.VARIABLE, raising=False)
    assert counts.part_of(1000) == 1000
    assert run_now(counts.in_turn(range(7))) == list(range(7))
    assert run_now([counts.in_full("large")]) == ["large"]
    assert counts.pytest_report_header() is None


def test_a_part_is_run_and_named(a_fifth: None) -> None:
    assert (counts.part_of(1000), counts.part_of(7), counts.part_of(1)) == (200, 2, 1)
    assert "one in 5 of their counts" in str(counts.pytest_report_header())
    params = counts.in_turn(range(7), pytest.mark.long)
    assert len(params) == 7
    assert len(run_now(params)) == 2
    assert all(p.marks[0].name == "long" for p in params)
    why = [mark.kwargs["reason"] for p in [*params, counts.in_full("large")] for mark in p.marks if mark.name == "skip"]
    assert len(why) == 6
    assert all("FP8WATCH_COUNTS=5" in reason and "make test-long runs it" in reason for reason in why)


def test_every_case_has_its_turn_and_a_commit_has_always_the_same(
    a_fifth: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []
    for commit in range(60):
        monkeypatch.setattr(counts, "_commit", lambda commit=commit: f"{commit:040x}")
        turns.append(run_now(counts.in_turn("abcdefg")))
        assert run_now(counts.in_turn("abcdefg")) == turns[-1]
    assert {case for turn in turns for case in turn} == set("abcdefg")
    assert len({tuple(turn) for turn in turns}) > 5


@pytest.mark.parametrize("wrong", ["0", "-1", "half"])
def test_a_count_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(counts.VARIABLE, wrong)
    with pytest.raises(pytest.UsageError, match="1 for the full counts"):
        counts.part_of(10)
