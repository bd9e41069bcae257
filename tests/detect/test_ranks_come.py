"""Ranks that register one after the other, or find a collector again that was away, are compared with each other all the same."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from detect.healthy_run import Run
from detect.scenarios import BY_NAME, Case

from fp8watch_agent.wire import Batch
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import LEFT_OUT, Finding
from fp8watch_server.detect.step_alignment import MAX_PENDING_STEPS, MAX_PENDING_WHILE_RANKS_COME, Assembly

BACKOFF_S = 7.0
"""Agents wait for up to 30 s between two tries; of four ranks the last is three of these behind the first."""
CASES = ("cross-rank-disagreement", "corruption-by-hash")


def told(found: list[Finding]) -> list[tuple[str, int, int | None]]:
    return [(f.mode, f.step, f.site) for f in found]


def of_each_rank(case: Case) -> list[list[Batch]]:
    return [list(trace.batches(case.per_batch)) for trace in case.traces]


def in_step(case: Case) -> list[tuple[str, int, int | None]]:
    """What is told where all ranks are there and send each step at once."""
    engine = DetectionEngine(case.traces[0].facts)
    engine.add_sessions(case.sessions[0])
    together = [b for batches in zip_longest(*of_each_rank(case)) for b in batches if b is not None]
    return told([f for at, batch in enumerate(together) for f in engine.observe(batch, at / 4)])


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_register_when_the_others_have_said_all_are_compared_with_them(name: str) -> None:
    case = BY_NAME[name].make(1, 2)
    engine = DetectionEngine(case.traces[0].facts)
    found: list[Finding] = []
    for rank, batches in enumerate(of_each_rank(case)):
        at = 100.0 + rank * BACKOFF_S
        found += engine.tick(at)
        engine.add_sessions(case.sessions[0][: rank + 1])
        found += [f for batch in batches for f in engine.observe(batch, at)]
    assert told(found) == in_step(case) != []


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_kept_while_the_collector_was_away_is_compared(name: str) -> None:
    case = BY_NAME[name].make(1, 2)
    engine = DetectionEngine(case.traces[0].facts)
    engine.add_sessions(case.sessions[0])
    ranks, before = of_each_rank(case), 2
    found = [f for i in range(before) for batches in ranks for f in engine.observe(batches[i], 100.0 + i)]
    for rank, late_s in ((0, 0.0), (3, 1.0), (2, 20.0), (1, 25.0)):
        found += engine.tick(200.0 + late_s)
        found += [f for batch in ranks[rank][before:] for f in engine.observe(batch, 200.0 + late_s)]
    assert told(found) == in_step(case) != []


def test_steps_of_no_statistic_are_counted_for_their_session_and_more_of_a_step_is_none() -> None:
    first, second = Run(rank=0, session="a" * 32), Run(rank=1, session="b" * 32)
    engine = DetectionEngine(first.facts)
    for k in range(4):
        for at in range(8 * k, 8 * k + 8, 4):  # two halves, and the second one again under another key
            engine.observe(first.batch(range(at, at + 4)), 10.0 * k)
        engine.observe(first.batch([8 * k + 7]), 10.0 * k)
    assert [n for n in engine.take_notices() if n.kind == LEFT_OUT] == []
    engine.observe(second.batch(range(2, 5)), 31.0)
    engine.observe(second.batch(range(5, 7)), 31.0)
    engine.observe(second.batch(range(32, 40)), 31.0)
    [told] = [n for n in engine.take_notices() if n.kind == LEFT_OUT]
    assert (told.session, told.rank, told.num, told.step) == ("b" * 32, 1, 5, 6)
    assert "5 of its steps" in told.text
    assert "step 6" in told.text
    assert [n for n in engine.take_notices() if n.kind == LEFT_OUT] == []


class Delivery:
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.opens_batch = rank, step, True


def deliver(assembly: Assembly[Delivery], rank: int, step: int, at: float) -> list[int]:
    assembly.heard(rank, at)
    assembly.add(Delivery(rank, step))
    return [group[0].step for group in assembly.ready()]


def test_a_rank_that_never_comes_holds_nobody_up_for_longer_than_a_silent_one() -> None:
    assembly: Assembly[Delivery] = Assembly(late_rank_s=10.0, silence_s=30.0)
    assembly.expect(0, num_ranks=8)
    waited = [deliver(assembly, 0, step, float(step)) for step in range(30)]
    assert waited == [[]] * 30
    assert deliver(assembly, 0, 30, 30.0) == list(range(31))
    assert [deliver(assembly, 0, step, float(step)) for step in (31, 32)] == [[31], [32]]


def test_a_rank_that_does_not_come_back_holds_nobody_up_for_longer_either() -> None:
    assembly: Assembly[Delivery] = Assembly(late_rank_s=10.0, silence_s=30.0)
    for step in range(8):
        for rank in range(2):
            assembly.expect(rank, num_ranks=2)
            deliver(assembly, rank, step, float(step))
    assert deliver(assembly, 0, 8, 100.0) == []
    assert deliver(assembly, 0, 9, 129.0) == []
    assert deliver(assembly, 0, 10, 130.0) == [8, 9, 10]
    assert deliver(assembly, 0, 11, 131.0) == [11]


def test_a_rank_that_ended_is_not_waited_for_behind_an_outage() -> None:
    assembly: Assembly[Delivery] = Assembly(late_rank_s=10.0, silence_s=30.0)
    for rank in range(2):
        assembly.expect(rank, num_ranks=2)
        deliver(assembly, rank, 0, 0.0)
    assembly.heard(1, 1.0, ended=True)
    assert deliver(assembly, 0, 1, 100.0) == [1]


@pytest.mark.parametrize("num_ranks", [2, 1000])
def test_what_waits_while_ranks_come_is_bounded(num_ranks: int) -> None:
    assembly: Assembly[Delivery] = Assembly()
    assembly.expect(0, num_ranks)
    went_on = [step for step in range(2000) for step in deliver(assembly, 0, step, 1.0)]
    most = max(MAX_PENDING_STEPS, MAX_PENDING_WHILE_RANKS_COME // num_ranks)
    assert went_on == list(range(2000 - most))


def test_a_new_attempt_waits_for_its_ranks_again() -> None:
    assembly: Assembly[Delivery] = Assembly()
    assembly.expect(0, num_ranks=2)
    for at, step in ((0.0, 5), (50.0, 3)):
        assert deliver(assembly, 0, step, at) == []
        assert deliver(assembly, 1, step, at + 25.0) == [step]
        assembly.restart()
        assembly.expect(0)
