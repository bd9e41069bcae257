"""Late, repeated and reordered steps, restarts, ranks and new sites change no verdict and are no fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.scenarios import BY_NAME

from fp8watch_agent.batch import Kind, Parcel, rekeyed, split
from fp8watch_agent.wire import Batch, decode_batch, encode_batch, rows_of
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.session_state import Stream


def test_a_batch_that_comes_twice_is_judged_once() -> None:
    run = Run()
    engine = DetectionEngine(run.facts)
    batch = run.batch([5], lambda rows, s, step: s["loss"].fill(float("nan")))
    assert len(engine.observe(batch)) == 1
    assert engine.observe(batch) == []


def test_a_late_step_is_judged_by_the_invariants() -> None:
    run = Run()
    engine = DetectionEngine(run.facts)
    late = run.batch([5], lambda rows, s, step: rows["scale_ratio_max"][[1]].fill(1.0) or rows["num_inf"].put(0, 1))
    assert engine.observe(run.batch(range(6, 20))) == []
    assert [(f.mode, f.step) for f in engine.observe(late)] == [("inf-laundering", 5)]


def test_healthy_batches_in_any_order_raise_nothing() -> None:
    run = Run(seed=3)
    batches = [run.batch(range(first, first + 4)) for first in range(0, 200, 4)]
    np.random.default_rng(0).shuffle(batches)
    engine = DetectionEngine(run.facts)
    assert [f for b in batches for f in engine.observe(b)] == []


@pytest.mark.parametrize(
    "name", ["optimizer-divergence", "frozen-scale", "outlier-growth", "chronic-quantization-noise"]
)
def test_batches_that_overtake_each_other_and_come_twice_change_no_verdict(name: str) -> None:
    trace = BY_NAME[name].make(1, 1).traces[0]
    batches = list(trace.batches())
    pairs = range(1, len(batches) - 1, 2)
    mixed = [batches[0], *(b for i in pairs for b in (batches[i + 1], batches[i], batches[i]))]
    mixed += batches[1 + 2 * len(pairs) :]

    def said(order: list[Batch]) -> list[tuple[str, int]]:
        engine = DetectionEngine(trace.facts)
        return [(f.mode, f.step) for b in order for f in engine.observe(b)]

    assert said(batches)
    assert said(mixed) == said(batches)


def test_steps_that_never_come_open_nothing_and_hide_nothing() -> None:
    trace = BY_NAME["optimizer-divergence"].make(1, 1).traces[0]
    lost = [b for i, b in enumerate(trace.batches(4)) if i % 5 != 2]
    engine = DetectionEngine(trace.facts)
    found = [f for b in lost for f in engine.observe(b)]
    assert {f.mode for f in found if f.severity == "critical"} == {"optimizer-divergence"}
    assert [f for f in found if f.step < BY_NAME["optimizer-divergence"].make(1, 1).onset] == []


@pytest.mark.parametrize("step", [0, 120])
def test_a_restart_begins_a_new_baseline(step: int) -> None:
    first, second = Run(seed=1, session="a" * 32), Run(seed=2, session="b" * 32)
    second._log2_weight += 3.0  # other weights: a jump of three octaves that is none
    engine = DetectionEngine(first.facts)
    batches = [first.batch(range(s, s + 8)) for s in range(0, 120, 8)]
    batches += [second.batch(range(s, s + 8)) for s in range(step, step + 120, 8)]
    assert [f for b in batches for f in engine.observe(b)] == []
    assert engine.delivered_step == step + 119


def test_a_replay_in_a_new_engine_gives_the_same_findings() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 30:
            s["loss"] = float("nan")
            rows["num_nan"] = 3 * (step > 30)

    batches = [run.batch(range(s, s + 4), change) for s in range(0, 60, 4)]
    one, two = DetectionEngine(run.facts), DetectionEngine(run.facts)
    first = [f for b in batches for f in one.observe(b)]
    for b in batches[:10]:
        two.observe(b)  # silently, as after a restart
    again = [f for b in batches[10:] for f in two.observe(b)]
    assert [f.extra["consequence"] for f in again] == [True] * len(again)
    assert again == [f for f in first if f.step >= 40]


def test_settled_is_the_step_that_every_live_rank_delivered() -> None:
    ranks = [Run(rank=r) for r in range(3)]
    engine = DetectionEngine(ranks[0].facts)
    assert engine.delivered_step is None
    engine.observe(ranks[0].batch(range(30)))
    engine.observe(ranks[1].batch(range(20)))
    assert engine.delivered_step == 19
    engine.observe(ranks[2].batch(range(25)))
    assert engine.delivered_step == 19
    engine.observe(ranks[0].batch(range(30, 300)))
    assert engine.delivered_step == 299  # the others are long gone


def test_sites_may_be_registered_later() -> None:
    run = Run()
    half = dict(list(run.facts.items())[:20])
    engine = DetectionEngine(half)
    assert engine.observe(run.batch(range(8))) == []  # records of unknown sites are left out
    engine.add_sites(run.facts)
    assert [f for s in range(8, 80, 8) for f in engine.observe(run.batch(range(s, s + 8)))] == []

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["num_inf"][-1] = 1

    [finding] = engine.observe(run.batch([80], change))
    assert finding.site == run.sites[-1].id


def test_an_empty_batch_and_a_step_without_records_are_fine() -> None:
    run = Run()
    run.sites, run.roles = run.sites, run.roles
    engine = DetectionEngine({})
    assert engine.observe(run.batch(range(3))) == []


def test_after_a_restart_the_steps_of_the_attempt_before_settle_nothing() -> None:
    engine = DetectionEngine(Run().facts)
    for rank in range(2):
        engine.observe(Run(rank=rank, session=f"old{rank}").batch(range(4960, 5000)))
    again = [Run(rank=rank, session=f"new{rank}") for rank in range(2)]
    engine.observe(again[0].batch(range(4000, 4008)))
    assert engine.delivered_step == 4007  # rank 1 has not come back yet: its 4999 is of the attempt before
    engine.observe(again[1].batch(range(4000, 4004)))
    assert engine.delivered_step == 4003


def test_training_that_goes_back_within_a_session_begins_anew() -> None:
    run = Run()
    engine = DetectionEngine(run.facts)

    def zero_tile(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 490:
            rows["scale_inv_min"][0], rows["num_off_scale_tiles"][0] = 0, 1

    def nan(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 150:
            rows["num_nan"][20] = 1

    first = [f for at in range(480, 492, 4) for f in engine.observe(run.batch(range(at, at + 4), zero_tile))]
    second = [f for at in range(100, 160, 4) for f in engine.observe(run.batch(range(at, at + 4), nan))]
    assert [(f.mode, f.step) for f in first] == [("zero-tile-eps", 490)]
    assert [(f.mode, f.step, f.extra["consequence"]) for f in second] == [("nan-in-activation", 150, False)]
    assert engine.delivered_step == 159


@pytest.mark.parametrize("part", [split, lambda parcel: (rekeyed(parcel),)], ids=["split", "under another key"])
def test_training_that_goes_back_behind_a_batch_that_was_sent_otherwise_begins_anew(
    part: Callable[[Parcel], tuple[Parcel, ...]],
) -> None:
    run = Run()
    engine = DetectionEngine(run.facts)
    first, whole, late, last = (run.batch(range(at, at + 4)) for at in (480, 484, 488, 492))
    body = encode_batch(whole.header, whole.steps, whole.step, whole.site, rows_of(whole))
    parts = [decode_batch(p.body) for p in part(Parcel(Kind.BATCH, whole.header.seq, body, 0))]
    assert [f for batch in (first, *parts, last, late, *parts) for f in engine.observe(batch)] == []
    assert [n.kind for n in engine.take_notices() if n.kind == "rewind"] == []
    engine.observe(run.batch(range(100, 104)))
    assert [n.kind for n in engine.take_notices() if n.kind == "rewind"] == ["rewind"]
    assert engine.delivered_step == 103


def test_a_state_from_behind_a_split_batch_knows_the_order_of_whole_ones() -> None:
    assert Stream.upgraded({"last_seq": 3 << 48 | 7}) == {"last_seq": 7}
    assert Stream.upgraded({"last_seq": -1}) == {"last_seq": -1}


def test_a_late_step_is_no_consequence_of_a_cause_far_from_it() -> None:
    run = Run()
    engine = DetectionEngine(run.facts)
    late = run.batch([5], lambda rows, s, step: rows["num_nan"].put(0, 1))

    def loss(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 99:
            s["loss"] = float("nan")

    engine.observe(run.batch(range(6, 100), loss))
    [finding] = engine.observe(late)
    assert (finding.mode, finding.extra["consequence"]) == ("nan-in-activation", False)


@pytest.mark.parametrize("by", ["a new session", "going back in place"])
def test_many_steps_that_are_missing_behind_a_restart_end_no_statistics(by: str) -> None:
    first, second = Run(session="a" * 32), Run(session="b" * 32)
    engine = DetectionEngine(first.facts)
    for at in range(480, 496, 8):
        engine.observe(first.batch(range(at, at + 8)))
    again = second if by == "a new session" else first
    for at in (400, 2000, 2002, 2004, 2006):
        engine.observe(again.batch(range(at, at + 2)))
    assert engine.delivered_step == 2007


def test_a_rank_that_goes_on_without_a_restart_is_missed_by_nobody_behind_a_gap() -> None:
    ranks = [Run(rank=rank, session=f"old{rank}") for rank in range(2)]
    engine = DetectionEngine(ranks[0].facts)
    for run in ranks:
        engine.observe(run.batch(range(480, 496)))
    ranks[0] = Run(rank=0, session="new0")
    for at in (496, 504):
        for run in ranks:
            engine.observe(run.batch(range(at, at + 8)))
    for at in (2000, 2002, 2004, 2006):  # rank 0 says no more
        engine.observe(ranks[1].batch(range(at, at + 2)))
    assert engine.delivered_step == 2007


def test_late_steps_of_the_attempt_before_are_of_no_statistics() -> None:
    old = [Run(rank=rank, session=f"old{rank}") for rank in range(2)]
    engine = DetectionEngine(old[0].facts)
    for run in old:
        engine.observe(run.batch(range(4984, 4992)), 0.0)
    new = [Run(rank=rank, session=f"new{rank}") for rank in range(2)]
    engine.observe(new[0].batch(range(4000, 4008)), 20.0)
    engine.tick(40.0)  # rank 1 is waited for no longer
    for at in (4992, 5000):
        engine.observe(old[1].batch(range(at, at + 8)), 41.0)
    engine.tick(60.0)
    assert engine.delivered_step == 4007
    for at in (4008, 4016):
        for run in new:
            engine.observe(run.batch(range(at, at + 8)), 60.0 + at)
    assert engine.delivered_step == 4023
