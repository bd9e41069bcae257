"""Numbers, octaves, times and names as they stand on a page."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import pytest

from fp8watch_server.pages import formatting


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "–"),
        (0, "0"),
        (119, "119"),
        (-3.0, "−3"),
        (1234567, "1\u2009234\u2009567"),
        (2.58512, "2.585"),
        (1e-12, "1e−12"),
        (0.00095, "9.5e−4"),
        (2.5e8, "2.5e8"),
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "−Inf"),
        ("nan", "NaN"),
        ("-inf", "−Inf"),
        ("<b>", "<b>"),
        (1e300, "1e300"),
    ],
)
def test_number(value: object, written: str) -> None:
    assert formatting.number(value) == written


def test_ratio_octave_and_unit() -> None:
    assert formatting.ratio(0.0123) == "1.23 %"
    assert formatting.ratio("nan") == "NaN"
    assert formatting.octaves(0.25) == "2^−2"
    assert formatting.octaves(0) == "0"
    assert formatting.quantity(31.6, "dB") == "31.6 dB"
    assert formatting.quantity(None, "dB") == "–"


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (1, "tiles", "1 tile"),
        (2, "tiles", "2 tiles"),
        (1, "of 12 tiles", "1 of 12 tiles"),
        ("28 or more", "dB", "28 dB or more"),
        ("5 or less", "steps", "5 steps or less"),
        ("1 or less", "ratio", "1 or less"),
        ("in (0.5, 1]", "ratio", "in (0.5, 1]"),
        (0.4991, "share", "49.9 %"),
        ("0.1 or less", "share", "10 % or less"),
        ("nan", "share", "NaN"),
    ],
)
def test_evidence_reads_as_a_sentence_would_say_it(value: object, unit: str, written: str) -> None:
    assert formatting.quantity(value, unit) == written


def test_times_in_any_spelling() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    for value in (at.timestamp(), "2026-01-02T03:04:05Z", at, at.replace(tzinfo=None)):
        assert formatting.clock(value) == "2026-01-02 03:04:05 UTC"
        assert formatting.ago(value, datetime(2026, 1, 2, 3, 6, 5, tzinfo=timezone.utc)) == "2 min ago"
    for value in (None, "yesterday", math.nan, 1e30):
        assert formatting.clock(value) == "–"


def test_latest_of_a_series_may_be_non_finite_or_absent() -> None:
    series = {"steps": [1, 2, 3], "values": [1.0, None, None], "nonfinite": [[1, "inf"]]}
    assert formatting.latest(series) == (2, "inf")
    assert formatting.latest({"steps": [1], "values": [None], "nonfinite": []}) == (None, None)


def test_small_line_of_non_finite_values_only_has_marks_and_no_path() -> None:
    spark = formatting.spark({"steps": [1, 2], "values": [None, None], "nonfinite": [[0, "nan"], [1, "-inf"]]})
    assert spark is not None
    assert spark.path == ""
    assert [what for _, what in spark.marks] == ["NaN", "−Inf"]


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ({"mode": "bad-batch", "earlier_cause_than": "loss-spike"}, "an earlier cause than loss-spike was found"),
        ({"mode": "bad-batch", "earlier_cause_than": "bad-batch"}, "traced to another place"),
        ({"mode": "bad-batch", "earlier_cause_than": "bad-batch", "num_sites": 3}, "traced to another place, reached 3 sites"),
        ({"mode": "bad-batch"}, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_an_event_of_an_incident_is_told_in_words(detail: object, said: str) -> None:
    assert formatting.details(detail) == said
