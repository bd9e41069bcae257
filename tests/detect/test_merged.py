"""Many ranks merge what says nothing new over 16 steps: what is found, and when, with a fraction of the records."""

from __future__ import annotations

import dataclasses

import pytest
from detect.folded import fold
from detect.hard import HARD
from detect.merged import merged
from detect.play import causes, place_is_right, play
from detect.rotated import turned
from detect.rotated_scenarios import SCENARIOS
from detect.scenarios import BY_NAME, Case, _replicas
from detect.trace import Trace

from fp8watch_server.detect.engine import DetectionEngine

AT = 120


RANKS = 10


def ranks_of(traces: list[Trace]) -> list[Trace]:
    """As many ranks that see the same."""
    [trace] = traces
    return [
        dataclasses.replace(
            trace, rank=rank, session=f"{rank:032x}", columns={k: v.copy() for k, v in trace.columns.items()}
        )
        for rank in range(RANKS)
    ]


QUICK = "inf-laundering"
RESTS_ON = "server/fp8watch_server/detect", "fp8watch/session/window_merge.py"


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.heavy(5, *RESTS_ON)) for n in SCENARIOS]
)
def test_a_fault_of_all_ranks_is_named_at_its_place_though_each_sends_little(name):
    case, expected = BY_NAME[name].make(1, 1), BY_NAME[name].expected
    sites = case.traces[0].facts
    case.traces = ranks_of(case.traces)
    shared = dataclasses.replace(case, traces=[merged(t) for t in case.traces], sites_at=dict(case.sites_at))
    [whole] = [f for f in causes(play(case)) if f.mode == expected.mode]
    found = play(shared)
    [hit] = [f for f in causes(found) if f.mode == expected.mode]
    assert place_is_right(sites, hit, expected)
    assert expected.verdict in ("any", hit.verdict)
    assert hit.step <= whole.step + 16
    told = [i.mode for i in fold(found, sites) if i.severity != "info" or i.mode == expected.mode]
    assert told == [expected.mode]


@pytest.mark.parametrize("name", ["blockwise", "delayed, hybrid"])
def test_a_healthy_run_raises_nothing_and_sends_a_fraction(name):
    trace = HARD[name](2001, 240)
    alone, shared = turned(trace, 16), merged(trace)
    assert [i.mode for i in fold(play(Case([shared], 0)), trace.facts) if i.severity != "info"] == []
    count = [sum(b.header.num_records for b in t.batches()) for t in (alone, shared)]
    assert count[1] < 0.5 * count[0]  # bursts and the first steps included; 0.18 between them


def test_more_of_a_step_that_was_judged_is_neither_a_late_step_nor_a_rewind():
    trace = merged(BY_NAME["frozen-scale"].make(1, 1).traces[0])
    engine, last, again = DetectionEngine(trace.facts), -1, 0
    for batch in trace.batches(per_batch=1):
        again += int(batch.steps["step"][0]) == last
        last = int(batch.steps["step"][-1])
        engine.observe(batch)
    assert again > 0
    assert engine.take_notices() == []


def test_healthy_ranks_that_send_at_different_steps_raise_nothing():
    traces = [merged(t) for t in _replicas(4, 4)]
    assert [i.mode for i in fold(play(Case(traces, 0)), traces[0].facts)] == []
