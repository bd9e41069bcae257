"""Full statistics go round over the sites: what rests on them is judged by the steps in which its site had its turn."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.hard import HARD
from detect.play import causes, place_is_right, play
from detect.rotated import rotating, turned
from detect.rotated_scenarios import SCENARIOS
from detect.scenarios import BY_NAME, GATE, Case, _replicas, _shadow
from detect.trace import healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.step_view import BatchColumns, SiteTable
from fp8watch_server.incidents.explain import explain

AT = 120


def incidents(case: Case) -> list[Folded]:
    return fold(play(case), case.traces[0].facts)


QUICK = ("inf-laundering", "gradient-underflow", "outlier-growth", "frozen-scale")
DETECT = "server/fp8watch_server/detect"
CASES = [
    (name, 16) if name in QUICK else pytest.param(name, 16, marks=pytest.mark.heavy(2, DETECT, first=True))
    for name in SCENARIOS
]
CASES += [
    pytest.param(name, 64, marks=pytest.mark.heavy(2, DETECT))
    for name in SCENARIOS
    if name != "chronic-quantization-noise"  # asks for more samples than its traces have at 64
]


@pytest.mark.parametrize(("name", "every"), CASES)
def test_a_fault_is_named_with_its_verdict_when_a_part_of_the_sites_is_full_in_a_step(name: str, every: int) -> None:
    case, expected = BY_NAME[name].make(1, 1), BY_NAME[name].expected
    case.traces = [turned(t, every) for t in case.traces]
    sites = case.traces[0].facts
    [hit] = [f for f in causes(play(case)) if f.mode == expected.mode]
    assert place_is_right(sites, hit, expected)
    assert expected.verdict in ("any", hit.verdict)
    told = [i.mode for i in incidents(case) if i.severity != "info" or i.mode == expected.mode]
    assert told == [expected.mode]


@pytest.mark.parametrize("every", [16, 64])
@pytest.mark.parametrize(
    "name", ["blockwise", "delayed, hybrid", "domain switch", "batch ×2", "masked tokens", "sharp attention"]
)
def test_a_healthy_run_raises_nothing_while_full_statistics_go_round(name: str, every: int) -> None:
    trace = turned(HARD[name](2001, 240), every)
    assert [(i.mode, i.severity) for i in incidents(Case([trace], 0)) if i.severity != "info"] == []


def test_a_site_that_loses_its_sqnr_is_told_by_its_own_samples_and_stays_one_incident() -> None:
    trace = healthy(3, 240, 1)
    trace.set_sqnr(trace.mask("layers.0.mlp.down_proj", "input", "rowwise"), np.full(240, 20.0))
    found = play(Case([turned(trace, 16)], 0))
    [incident] = fold(found, trace.facts)
    assert incident.mode == "chronic-quantization-noise"
    assert (incident.first.step, incident.first.extra["stride"]) == (2, 4)  # the sampling is not known yet
    assert incident.last_step > 220
    assert {f.evidence[-1].value for f in found} == {1}


def test_a_drop_of_the_sqnr_is_held_against_the_samples_of_its_own_site() -> None:
    trace = healthy(3, 320, 1)
    one = trace.mask("layers.0.mlp.down_proj", "weight")
    rng = np.random.default_rng(1)
    trace.set_sqnr(
        one, np.where(np.arange(320) >= 240, 28.3, 32.0) + rng.normal(0, 0.05, 320)
    )  # in its band all the time
    [incident] = incidents(Case([turned(trace, 8)], 240))
    assert incident.mode == "chronic-quantization-noise"
    assert 240 <= incident.first.onset <= 248
    assert incident.first.step <= 240 + 4 * 8
    assert incident.first.extra["stride"] == 8


def test_noise_far_under_its_band_is_told_after_three_samples_of_its_site() -> None:
    trace = healthy(3, 240, 1)
    one = trace.mask("layers.0.mlp.down_proj", "input")
    trace.set_sqnr(one, np.where(np.arange(240) >= AT, 15.0, 31.5))
    [incident] = incidents(Case([turned(trace, 32)], AT))
    assert incident.mode == "chronic-quantization-noise"
    assert incident.first.step <= AT + 3 * 32


def _sqnr(ranks: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """(tile SQNR over ranks of which one was sampled, that of full samples), of the last step of a batch. [S]"""
    traces = _replicas(3, ranks)
    table = SiteTable(traces[0].facts)
    got = []
    for n in (every, 1):
        views = []
        for trace in traces:
            *_, last = rotating(trace.batches(8), n)
            *_, view = BatchColumns(last, table).views()
            views.append(view)
        got.append(CrossRankStep(views, table).sqnr_db)
    return got[0], got[1]


def test_ranks_that_take_turns_do_not_make_the_sqnr_of_a_site_better() -> None:
    part, whole = _sqnr(4, 4)
    seen = ~np.isnan(part)
    assert np.count_nonzero(seen) > 0
    assert np.abs(part[seen] - whole[seen]).max() < 3.0  # one rank against four: 6 dB when divided by the tiles of all


def test_ranks_that_take_turns_do_not_make_an_outlier_of_every_site() -> None:
    traces = _replicas(3, 4)
    table = SiteTable(traces[0].facts)
    kurtosis = []
    for n in (8, 1):
        views = []
        for trace in traces:
            *_, last = rotating(trace.batches(8), n)
            *_, view = BatchColumns(last, table).views()
            views.append(view)
        kurtosis.append(CrossRankStep(views, table).log2_kurtosis)
    seen = ~np.isnan(kurtosis[0])
    assert 0 < np.count_nonzero(seen) < len(seen)
    assert np.abs(kurtosis[0][seen] - kurtosis[1][seen]).max() < 1.5


def test_healthy_ranks_that_take_turns_raise_nothing() -> None:
    traces = [turned(t, 16) for t in _replicas(4, 4)]
    assert [(i.mode, i.severity) for i in incidents(Case(traces, 0))] == []


def test_noise_of_one_site_is_told_though_each_rank_looks_at_another() -> None:
    traces = _replicas(4, 4)
    for t in traces:
        t.set_sqnr(t.mask("layers.0.mlp.down_proj", "input"), np.full(t.num_steps, 20.0))
    got = incidents(Case([turned(t, 16) for t in traces], 0))
    assert [i.mode for i in got] == ["chronic-quantization-noise"]
    assert got[0].first.step <= 64


def test_a_gemm_that_is_wrong_stays_one_incident_between_the_turns_of_its_shadow() -> None:
    trace = healthy(3, 300, 1)
    _shadow(trace, np.random.default_rng(0))
    modules = {s.module: k for k, s in enumerate(trace.sites)}
    turn = np.array([modules[s.module] % 40 for s in trace.sites])
    shadowed = np.arange(300)[:, None] % 40 == turn
    trace.columns["measured"][~shadowed] &= ~int(Measured.GEMM)
    wrong = trace.mask(GATE, "input", "rowwise")
    trace.columns["gemm_error"][AT:, wrong] = 0.02
    trace.columns["gemm_error"][~shadowed] = 0
    trace.columns["gemm_gain_max"][~shadowed], trace.columns["gemm_gain_min"][~shadowed] = 0, np.inf
    [incident] = incidents(Case([trace], AT))
    assert incident.mode == "accumulator-precision"
    assert incident.first.step < AT + 40
    assert AT - 40 < incident.first.earliest(0) <= AT, "it began behind the last look that was good"
    assert incident.last_step > 250
    words = explain(incident.first, trace.facts)
    assert GATE in words.title


def test_an_engine_that_was_saved_before_sites_took_turns_goes_on() -> None:
    trace = turned(healthy(3, 64), 16)
    engine = DetectionEngine(trace.facts)
    batches = list(trace.batches())
    for b in batches[:4]:
        engine.observe(b)
    again = DetectionEngine.load(engine.dump(), trace.facts)
    assert again._samples.of(True, np.array([0])) == engine._samples.of(True, np.array([0]))
    for b in batches[4:]:
        assert repr(again.observe(b)) == repr(engine.observe(b))
