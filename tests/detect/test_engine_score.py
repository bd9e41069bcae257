"""The engine on made-up traces at attach's rarest: every fault found, under its name, at its place, and nothing else said.

The same scoring as `make bench-detect`, on one seed that no threshold was chosen on. Some in each run of the tests, all of them
with the long ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarks.detection.report import Point, report
from benchmarks.detection.score import RAREST, SPLITS, faults, healthy_runs
from benchmarks.detection.scoring import Outcome
from detect.scenarios import SCENARIOS, Scenario

DETECT = ("server/fp8watch_server/detect", "tests/benchmarks/detection")
QUICK = ("zero-tile-eps", "gradient-underflow", "outlier-growth", "silent-data-corruption")
MISSED = {("chronic-quantization-noise", 0), ("chronic-quantization-noise", 1)}
"""Ask for more samples of a site than these traces have at once in 64 steps."""
CASES = [pytest.param(s, (1,), id=f"{s.name}, medium") for s in SCENARIOS if s.name in QUICK]
CASES += [pytest.param(s, (0, 1, 2), marks=pytest.mark.heavy(4, *DETECT), id=s.name) for s in SCENARIOS]


@pytest.mark.parametrize(("scenario", "levels"), CASES)
def test_recall_and_precision_of_a_scenario_stay_one(scenario: Scenario, levels: Sequence[int]) -> None:
    outcomes = list(faults(SPLITS["test"], 1, RAREST, [scenario], levels))
    assert {(o.name, o.level) for o in outcomes if not o.found} == MISSED & {(scenario.name, n) for n in levels}
    found = [o for o in outcomes if o.found]
    assert {o.said for o in found} == {scenario.expected.mode}
    assert all(o.place and o.verdict for o in found)
    assert [o.num_false for o in outcomes] == [0] * len(outcomes)
    if scenario.invariant:
        assert max(o.delay or 0 for o in found) <= 1


@pytest.mark.heavy(20, *DETECT)
def test_healthy_runs_raise_no_warning_and_no_page() -> None:
    runs = list(healthy_runs(SPLITS["test"], 3000, RAREST, 250))
    assert sum(r.num_steps for r in runs) == 3000
    assert [(r.name, r.named) for r in runs if r.pages or r.warnings] == []


def test_the_report_of_a_few_runs_says_what_was_found() -> None:
    name = QUICK[0]
    made = [Outcome(name, n, name, True, 0, name, True, True, 1) for n in range(3)]
    point = Point(RAREST, made, [], [], [])
    text = report(
        point, Point(1, made, [], [], []), {"invariants": 0.1, "everything": 1.0, "state_kib": 5.0}, "test", 1
    )
    assert "| recall, medium and severe | ≥ 0.97 | 1.00 (2 of 2; 95 % lower bound 0.22) | 1.00 (2 of 2" in text
    assert f"| {name} | 1.00 / 1.00 / 1.00 | 0 / 0 / 0 |" in text
