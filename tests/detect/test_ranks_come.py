"""Ranks that register one after the other, or find a collector again that was away, are compared with each other all the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import msgspec
import pytest
from detect.healthy_run import Run
from detect.scenarios import BY_NAME, Case

from fp8watch_agent.wire import Batch
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import LEFT_OUT, Finding
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.detect.step_alignment import (
    FEW_RECORDS,
    FEW_STEPS,
    MAX_PENDING_RECORDS,
    MAX_PENDING_STEPS,
    VERY_FEW_STEPS,
    Assembly,
)

APART_S = 3.0
"""Between two ranks that register: the last of four is waited for."""
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
        at = 100.0 + rank * APART_S
        found += engine.tick(at)
        engine.add_sessions(case.sessions[0][: rank + 1])
        found += [f for batch in batches for f in engine.observe(batch, at)]
    assert told(found) == in_step(case) != []


def again(batch: Batch, session: str) -> Batch:
    return replace(batch, header=msgspec.structs.replace(batch.header, session=session))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("registered", [True, False])
def test_ranks_of_a_later_attempt_are_compared_as_well(name: str, registered: bool) -> None:
    """However many begin again, the attempt begins once."""
    case, healthy = BY_NAME[name].make(1, 2), BY_NAME[name].make(1, -1)
    engine = DetectionEngine(case.traces[0].facts)
    engine.add_sessions(case.sessions[0])
    for i, together in enumerate(zip(*(batches[:3] for batches in of_each_rank(healthy)), strict=True)):
        for batch in together:
            engine.observe(batch, 10.0 + i)
    sessions = [replace(s, session="f" + s.session[1:], attempt=2) for s in case.sessions[0]]
    found: list[Finding] = []
    for rank, batches in enumerate(of_each_rank(case)):
        at = 300.0 + APART_S * rank
        engine.add_sessions(sessions[: rank + 1] if registered else [])
        found += [f for batch in batches for f in engine.observe(again(batch, sessions[rank].session), at)]
    found += engine.tick(400.0)
    ranks = {f.mode: len([g for g in found if g.mode == f.mode]) for f in found}
    assert ranks == {mode: num for mode, num in ranks.items() if mode in {m for m, *_ in in_step(case)}} != {}
    assert [n.num for n in engine.take_notices() if n.kind == LEFT_OUT] == []


def test_ranks_that_go_back_in_place_do_so_together() -> None:
    runs = [Run(rank=rank, session=letter * 32) for rank, letter in enumerate("abcd")]
    engine = DetectionEngine(runs[0].facts)
    engine.add_sessions([SessionFacts(session=run.session, rank=run.rank, world_size=4) for run in runs])
    judged: list[tuple[int, ...]] = []
    roll_up = engine._roll_up
    engine._roll_up = lambda group: (judged.append((group[0].step, len(group))), roll_up(group))[1]
    for run in runs:
        engine.observe(run.batch(range(480, 496)), 10.0)
    assert judged == [(step, 4) for step in range(480, 496)]
    judged.clear()
    for at, run in enumerate(runs):
        engine.observe(run.batch(range(400, 408)), 11.0 + at)
        assert engine.delivered_step == (407 if at == 3 else 399)
    assert judged == [(step, 4) for step in range(400, 408)]
    judged.clear()
    for run in runs:  # and once more
        engine.observe(run.batch(range(398, 402)), 20.0)
    assert judged == [(step, 4) for step in range(398, 402)]


def test_a_session_of_an_attempt_before_that_is_heard_late_is_not_the_newest() -> None:
    facts = [SessionFacts(session=letter * 32, rank=0, attempt=k + 1) for k, letter in enumerate("abc")]
    runs = [Run(session=f.session) for f in facts]
    engine = DetectionEngine(runs[0].facts)
    engine.add_sessions(facts)
    for k in (0, 2, 1):  # what lay on a disk comes last
        engine.observe(runs[k].batch(range(100 * k, 100 * k + 8)), 10.0)
    engine.observe(runs[2].batch(range(208, 216)), 11.0)
    assert engine.delivered_step == 215
    assert [n.num for n in engine.take_notices() if n.kind == LEFT_OUT] == []


@pytest.mark.parametrize("last", range(4))
@pytest.mark.parametrize("name", CASES)
def test_what_ranks_kept_is_compared_though_each_sends_its_newest_batch_first(name: str, last: int) -> None:
    case = BY_NAME[name].make(1, 2)
    engine = DetectionEngine(case.traces[0].facts)
    engine.add_sessions(case.sessions[0])
    ranks, before = of_each_rank(case), 2
    found = [f for i in range(before) for batches in ranks for f in engine.observe(batches[i], 100.0 + i)]
    for rank, late_s in zip((*(rank for rank in range(4) if rank != last), last), (0.0, 1.0, 20.0, 25.0), strict=True):
        kept = ranks[rank][before:]
        half = len(kept) // 2
        kept = [kept[-1], *kept[:half], kept[-2], *kept[half:-2]]
        found += [f for batch in kept for f in engine.observe(batch, 200.0 + late_s)]
    assert told(found) == in_step(case) != []
    assert [n.num for n in engine.take_notices() if n.kind == LEFT_OUT] == []


def test_what_ranks_kept_before_there_was_a_collector_is_judged_in_its_order() -> None:
    case = BY_NAME[CASES[1]].make(1, 2)
    engine = DetectionEngine(case.traces[0].facts)
    engine.add_sessions(case.sessions[0])
    found: list[Finding] = []
    for rank, kept in enumerate(of_each_rank(case)):
        newest = msgspec.structs.replace(kept[-1].header, health={"spooled": 400.0})
        kept = [replace(kept[-1], header=newest), *kept[:-1]]
        found += [f for batch in kept for f in engine.observe(batch, 200.0 + APART_S * rank)]
    assert told(found) == in_step(case) != []


@pytest.mark.parametrize("there", [True, False])
def test_what_one_rank_kept_is_judged_in_its_order(there: bool) -> None:
    """While the collector was away, or before there was one."""
    run = Run()
    engine = DetectionEngine(run.facts)
    judged: list[int] = []
    roll_up = engine._roll_up
    engine._roll_up = lambda group: (judged.append(group[0].step), roll_up(group))[1]
    batches = [run.batch(range(first, first + 8)) for first in range(0, 160, 8)]
    if there:
        engine.observe(batches.pop(0), 100.0)
    newest = batches.pop()
    health = {"spooled": 400.0}
    batches.insert(0, replace(newest, header=msgspec.structs.replace(newest.header, health=health)))
    for k, batch in enumerate(batches):
        engine.observe(batch, 200.0 + k)
    engine.observe(run.batch(range(160, 168)), 220.0)
    assert judged == list(range(168))
    assert [n.num for n in engine.take_notices() if n.kind == LEFT_OUT] == []


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
    def __init__(self, rank: int, step: int, num_records: int = 1) -> None:
        self.rank, self.step, self.opens_batch, self.num_records = rank, step, True, num_records


def deliver(assembly: Assembly[Delivery], rank: int, step: int, at: float, num_records: int = 1) -> list[int]:
    assembly.heard(rank, at)
    assembly.add(Delivery(rank, step, num_records))
    return [group[0].step for group in assembly.ready()]


def test_a_rank_that_never_comes_holds_nobody_up_for_longer_than_one_that_is_late() -> None:
    assembly: Assembly[Delivery] = Assembly(late_rank_s=10.0, silence_s=30.0)
    assembly.expect(0, num_ranks=8)
    waited = [deliver(assembly, 0, step, float(step)) for step in range(10)]
    assert waited == [[]] * 10
    assert assembly.settling
    assert deliver(assembly, 0, 10, 10.0) == list(range(11))
    assert [deliver(assembly, 0, step, float(step)) for step in (11, 12)] == [[11], [12]]
    assert not assembly.settling


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


@pytest.mark.parametrize(("num_records", "most"), [
    (1, MAX_PENDING_STEPS),
    (MAX_PENDING_RECORDS // 100, 100),
    (MAX_PENDING_RECORDS, min(FEW_STEPS, FEW_RECORDS // MAX_PENDING_RECORDS)),
    (FEW_RECORDS // 40, 40),
    (FEW_RECORDS, VERY_FEW_STEPS),
])  # fmt: skip
def test_what_waits_is_bounded(num_records: int, most: int) -> None:
    assembly: Assembly[Delivery] = Assembly()
    assembly.expect(0, 2)
    went_on = [step for step in range(2000) for step in deliver(assembly, 0, step, 1.0, num_records)]
    assert went_on == list(range(2000 - most))


@pytest.mark.parametrize("jump_s", [86_400.0, -3_600.0])
def test_a_clock_that_jumps_holds_nobody_up_for_longer(jump_s: float) -> None:
    """Of a collector whose clock was wrong for one batch, or was set back."""
    assembly: Assembly[Delivery] = Assembly(late_rank_s=10.0, silence_s=30.0)
    assembly.expect(0, num_ranks=2)
    assembly.expect(1, num_ranks=2)
    deliver(assembly, 1, 0, 10_000.0)
    for step in range(60):
        deliver(assembly, 0, step, 10_000.0 + step)
    wrong = 10_060.0 + jump_s
    deliver(assembly, 0, 60, wrong)
    since = 10_060.0 if jump_s > 0 else wrong
    went_on = [step for k in range(61, 161) for step in deliver(assembly, 0, k, since + k - 60)]
    assert went_on[-1:] == [160]


def test_batches_of_more_steps_than_may_wait_of_large_ones_are_compared() -> None:
    """A hundred steps a second, and a batch a second: the first rank is a batch ahead."""
    runs = [Run(rank=rank, session=letter * 32) for rank, letter in enumerate("ab")]
    engine = DetectionEngine(runs[0].facts)
    engine.add_sessions([SessionFacts(session=run.session, rank=run.rank, world_size=2) for run in runs])
    for k in range(5):
        for run in runs:
            engine.observe(run.batch(range(100 * k, 100 * k + 100)), 10.0 + k)
    assert [n.num for n in engine.take_notices() if n.kind == LEFT_OUT] == []
    assert engine.delivered_step == 499


def test_a_new_attempt_waits_for_its_ranks_again() -> None:
    assembly: Assembly[Delivery] = Assembly()
    assembly.expect(0, num_ranks=2)
    for at, step in ((0.0, 5), (50.0, 3)):
        assert deliver(assembly, 0, step, at) == []
        assert deliver(assembly, 1, step, at + 8.0) == [step]
        assembly.restart()
        assembly.expect(0)
