"""Every failure mode is named, at its place, with its verdict; its healthy twin is not."""

from __future__ import annotations

import numpy as np
import pytest
from detect.play import causes, place_is_right, play
from detect.scenarios import BY_NAME, DOWN, GATE, SCENARIOS, Case, Scenario, twin
from detect.trace import healthy

from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.detect.precedence import explains
from fp8watch_server.incidents.explain import explain

LEVELS = ("mild", "medium", "severe")


def check(scenario: Scenario, seed: int, level: int) -> None:
    case = scenario.make(seed, level)
    sites = case.traces[0].facts
    found = causes(play(case))
    expected = scenario.expected
    hit = [f for f in found if f.mode == expected.mode]
    assert hit, f"not found; said {[(f.mode, f.step - case.onset) for f in found]}"
    [finding] = hit
    assert finding.step >= case.onset
    if scenario.invariant:
        assert finding.step - case.onset <= 1
    assert place_is_right(sites, finding, expected), sites.get(finding.site or 0)
    assert expected.verdict in ("any", finding.verdict)
    assert expected.critical in (None, finding.severity == "critical")
    # What else is said is a consequence or a herald of the mode, or comes from it later.
    others = [
        f.mode
        for f in found
        if f.mode != expected.mode and not explains(expected.mode, f.mode) and f.severity != "info"
    ]
    assert others == []
    said = explain(finding, sites)
    assert said.title
    assert said.title[0].isupper() or said.title.startswith(("layers", "tok", "lm_head", "fprop", "dgrad", "rollout"))
    assert said.fix
    assert "Verdict" in said.cause


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_medium_fault_is_named_at_its_place(scenario: Scenario) -> None:
    check(scenario, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("level", [0, 2], ids=lambda n: LEVELS[n])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_mild_and_severe_faults_are_named_at_their_place(scenario: Scenario, level: int) -> None:
    check(scenario, 2, level)


@pytest.mark.parametrize(
    ("depth", "db", "said"),
    [(1.6, 27.0, []), (1.6, 17.0, []), (1.4, 10.0, []), (1.6, 15.0, ["delayed-clip"]), (7.0, 27.0, ["delayed-clip"])],
)
def test_a_single_clip_is_told_by_its_depth_or_by_its_damage_too(depth: float, db: float, said: list[str]) -> None:
    trace = healthy(3, 120, recipe="delayed", hybrid=True)
    one = trace.mask(DOWN, "input")
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][100, one] = depth
    trace.set_sqnr(one, np.where(np.arange(120) == 100, db, trace.sqnr(one)[:, 0]))
    assert [f.mode for f in play(Case([trace], 100)) if f.severity != "info"] == said


def test_clips_that_come_again_are_told_though_none_of_them_did_harm() -> None:
    trace = healthy(3, 120, recipe="delayed", hybrid=True)
    one = trace.mask(DOWN, "input")
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][100:103, one] = 1.6
    found = [f for f in play(Case([trace], 100)) if f.severity != "info"]
    assert [(f.mode, f.step, f.severity) for f in found] == [("delayed-clip", s, "warning") for s in (101, 102)]


@pytest.mark.parametrize(
    ("operand", "depth", "severity"),
    [("grad_output", 2.5, "warning"), ("grad_output", 20.0, "critical"), ("input", 2.5, "critical")],
)
def test_a_gradient_that_is_clipped_less_than_its_limit_wakes_nobody(operand: str, depth: float, severity: str) -> None:
    """Four steps that cost half of the mantissa: those of a sound run's key projection were."""
    trace = healthy(3, 120, recipe="delayed", hybrid=True)
    one = trace.mask(DOWN, operand)
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][100:104, one] = depth
    steps = np.arange(120)
    trace.set_sqnr(one, np.where((steps >= 100) & (steps < 104), 12.0, trace.sqnr(one)[:, 0]))
    found = [f for f in play(Case([trace], 100)) if f.mode == "delayed-clip"]
    assert {f.severity for f in found} - {"info"} == {severity}


def test_a_fault_that_lasts_does_not_become_the_new_normal() -> None:
    """Had the baseline learned it, the alarm would be over after half of its window."""
    case = BY_NAME["gradient-underflow"].make(3, 1)
    steps = [f.step for f in play(case) if f.mode == "gradient-underflow"]
    assert steps[0] < case.onset + 6
    assert steps[-1] == case.traces[0].num_steps - 1


def test_what_all_gradients_do_together_is_no_fault_of_one() -> None:
    trace = healthy(3, 200)
    falls = np.where(np.arange(200) >= 120, -4.0, 0.0)
    trace.grow(trace.mask(operand="grad_output"), falls)
    assert [f.mode for f in play(Case([trace], 120))] == []
    trace.grow(trace.mask(GATE, "grad_output"), 2 * falls)  # this one's fall further than the others'
    assert {f.mode for f in play(Case([trace], 120))} == {"dead-layer"}


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "not measured"])
@pytest.mark.parametrize(("operand", "other"), [("input", "grad_output"), ("grad_output", "input")])
def test_of_a_layer_that_is_dead_one_way_the_other_is_spoken_of_where_it_was_measured(
    operand: str, other: str, measured: bool
) -> None:
    """Under no_grad, and in front of what is trained, a layer has no gradient."""
    t = healthy(3, 200)
    t.grow(t.mask(GATE, operand), np.where(np.arange(200) >= 120, -9.0, 0.0))
    if not measured:
        t.columns["measured"][:, t.mask(GATE, other)] = 0
        t.columns["amax_max"][:, t.mask(GATE, other)] = np.nan
    [first] = [f for f in play(Case([t], 120)) if f.mode == "dead-layer"][:1]
    cause = explain(first, t.facts).cause
    said = "Its gradient did not fall as far" if operand == "input" else "its input did not"
    assert (said in cause) is measured
    assert ("was not measured in this step" in cause) is not measured


@pytest.mark.parametrize(
    "name", ["nan-in-loss", "delayed-clip", "corruption-by-hash", "cross-rank-disagreement", "expert-outlier"]
)
def test_the_healthy_twin_is_not(name: str) -> None:
    [scenario] = [s for s in SCENARIOS if s.name == name]
    assert [(f.mode, f.step) for f in play(twin(scenario, 1)) if f.severity != "info"] == []


def test_every_mode_has_a_scenario() -> None:
    of_sessions = {"two-jobs-one-run"}  # no column shows it: test_two_jobs.py
    assert {s.expected.mode for s in SCENARIOS} == set(SLUGS) - of_sessions
