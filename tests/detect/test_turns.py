"""Sites that are looked at in turn: a round of them is one sample, and faults are found in a few rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from detect import scenarios
from detect.in_turns import in_turns, of_all
from detect.play import causes, play
from detect.scenarios import BY_NAME, Case
from detect.trace import Trace, healthy

from fp8watch_agent.training_names import WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families.corruption import Corruption
from fp8watch_server.detect.finding import Evidence
from fp8watch_server.detect.step_view import BatchColumns, SiteTable
from fp8watch_server.detect.turns import LONGEST_ROUND, Turns


def steps_of(trace: Trace, table: SiteTable) -> list[CrossRankStep]:
    views = [view for batch in trace.batches() for view in BatchColumns(batch, table).views()]
    return [CrossRankStep([view], table) for view in views]


def table_of(trace: Trace) -> SiteTable:
    table = SiteTable()
    table.add(trace.facts)
    return table


@pytest.fixture(scope="module")
def steps() -> list[CrossRankStep]:
    trace = in_turns(healthy(seed=1, num_steps=112))
    return steps_of(trace, table_of(trace))


def test_a_step_of_most_sites_is_a_sample_by_itself(steps: list[CrossRankStep]) -> None:
    turns = Turns()
    assert all(turns.sample(step, len(step)) is step for step in steps[:12])


def test_a_round_is_one_sample_which_ends_as_soon_as_nearly_all_have_come(steps: list[CrossRankStep]) -> None:
    turns, known = Turns(), len(steps[0])
    for step in steps[:12]:
        turns.sample(step, known)
    samples = [(step, turns.sample(step, known)) for step in steps[73:]]
    rounds = [got for step, got in samples if got is not None and got is not step]
    assert rounds
    for got in rounds:
        assert 10 < len(got.earlier) + 1 <= LONGEST_ROUND
        assert got.seen.mean() >= 7 / 8
        assert np.all(np.isfinite(got.log2_amax[got.seen]))
        assert got.scalar("loss") == steps[got.step].scalar("loss")
        for row in np.flatnonzero(got.seen):
            at = got.measured_at(int(row))
            assert got.step - LONGEST_ROUND < at <= got.step
            assert got.log2_amax[row] == steps[at].log2_amax[row]
            told = got.finding(
                "outlier-growth", "warning", np.array([row]), [Evidence("amax_max", 1.0, 2.0, "", got.step)], "fp8"
            )
            assert (told.step, told.evidence[0].since_step) == (got.step, at)


def test_after_values_broke_a_round_begins_anew(steps: list[CrossRankStep]) -> None:
    turns, known = Turns(), len(steps[0])
    for step in steps[73:83]:
        turns.sample(step, known)
    turns.forget()
    got = [turns.sample(step, known) for step in steps[84:94]]
    assert got == [None] * 10


def test_of_a_rank_the_newest_record_of_a_site_counts_and_of_each_rank_one() -> None:
    traces = [healthy(seed=1, num_steps=8) for _ in range(2)]
    traces[1].rank = 1
    for k, trace in enumerate(traces):
        trace.columns["amax_max"][:] = np.exp2(np.arange(8.0) - 8 * k)[:, None]
        trace.columns["num_tiles"][:] = 10 + k
    table = table_of(traces[0])
    first, second = (steps_of(trace, table) for trace in traces)
    earlier = [CrossRankStep([a.views[0], b.views[0]], table) for a, b in zip(first[:3], second[:3], strict=True)]
    whole = CrossRankStep(first[3].views, table, earlier)
    assert np.all(whole.column("amax_max") == 8.0)
    assert np.all(whole.column("num_tiles") == 21)
    assert set(whole.of_rank("amax_max", np.ones(len(table), dtype=np.int64))) == {2.0**-6}


def played(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Case, list[Any]]:
    monkeypatch.setattr(scenarios, "STEPS", 460)
    monkeypatch.setattr(scenarios, "ONSET", 240)
    case = BY_NAME[name].make(0, 0)
    return case, causes(play(of_all(case)))


@pytest.mark.parametrize(("name", "within"), [
    ("dead-layer", 8 * LONGEST_ROUND),
    ("gradient-underflow", 6 * LONGEST_ROUND),
    ("outlier-growth", 8 * LONGEST_ROUND),
])  # fmt: skip
def test_a_fault_is_found_in_a_few_rounds_and_under_its_name(
    name: str, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = played(name, monkeypatch)
    expected = BY_NAME[name].expected
    ours = [f for f in found if f.mode == expected.mode]
    assert ours
    assert case.onset <= ours[0].step <= case.onset + within
    assert {f.mode for f in found} <= {expected.mode, "bad-batch"}
    facts = case.traces[0].facts[ours[0].site]
    assert expected.module is None or facts.module.endswith(expected.module)


def test_a_healthy_run_raises_nothing() -> None:
    assert play(Case([in_turns(healthy(seed=3, num_steps=400, num_layers=4))], 0)) == []


def test_an_engine_is_saved_and_read_back_in_the_midst_of_a_round() -> None:
    trace = in_turns(healthy(seed=2, num_steps=160))
    engine = DetectionEngine(trace.facts)
    for i, batch in enumerate(trace.batches(per_batch=5)):
        if i % 7 == 3:
            engine = DetectionEngine.load(engine.dump(), trace.facts)
        assert engine.observe(batch) == []
    assert engine._light_apart() <= LONGEST_ROUND


def test_a_weight_that_was_written_within_a_round_was_written_in_its_step() -> None:
    trace = in_turns(healthy(seed=1, num_steps=112))
    at = np.full(112, np.nan)
    at[80] = 3.0
    trace.logs |= {WEIGHTS_CHANGED: at, WEIGHTS_LOOKED: np.where(np.isnan(at), at, 9.0)}
    found = steps_of(trace, table_of(trace))
    whole = CrossRankStep(found[84].views, found[84].table, found[76:84])
    corruption = Corruption(len(found[0]))
    corruption._notice_written(whole)
    assert corruption._writes is not None
    assert (corruption._writes.step, corruption._writes.changed) == (80, 3)
