"""The made-up fleet: the same plan gives the same bytes, and detectors find it healthy."""

from __future__ import annotations

import numpy as np

from fp8watch_agent.record import Measured, holds
from fp8watch_agent.wire import decode_batch
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import facts_of
from fp8watch_server.load.model import make_sites
from fp8watch_server.load.stream import LoadPlan, RankStream


def test_the_same_plan_gives_the_same_bytes_and_another_seed_others() -> None:
    plan = LoadPlan(num_sites=40, num_steps=3)
    once, again = ([b.data for b in RankStream(plan, 1)] for _ in range(2))
    assert once == again
    others = [
        RankStream(LoadPlan(num_sites=40, num_steps=3, seed=1), 1),
        RankStream(plan, 2),
        RankStream(LoadPlan(num_sites=40, num_steps=3, first_step=3), 1),
    ]
    for other in others:
        assert not {b.data for b in other} & set(once)


def test_the_records_do_not_depend_on_how_steps_are_cut_into_batches() -> None:
    whole, parts = (
        [decode_batch(b.data) for b in RankStream(LoadPlan(num_sites=35, num_steps=7, steps_per_batch=n))]
        for n in (7, 2)
    )
    assert (len(whole), len(parts)) == (1, 4)
    for name in whole[0].sent:
        joined = np.concatenate([p.column(name) for p in parts])
        assert np.array_equal(whole[0].column(name), joined), name
    assert np.array_equal(whole[0].steps, np.concatenate([p.steps for p in parts]))


def test_between_samples_records_lack_what_only_samples_measure() -> None:
    (batch,) = [
        decode_batch(b.data) for b in RankStream(LoadPlan(num_sites=10, num_steps=12, steps_per_batch=12, every=5))
    ]
    assert len(batch.steps) == 12
    assert batch.step.tolist() == np.repeat(np.arange(12), 10).tolist()
    full = holds(batch.column("measured"), Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH)
    assert sorted(set(batch.step[full].tolist())) == [0, 5, 10]
    assert not batch.column("noise_energy")[~full].any()
    assert not batch.column("depth_hist")[~full].any()
    assert holds(batch.column("measured"), Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO).all()


def test_a_fault_put_in_travels_also_between_samples() -> None:
    def change(rows, step_row, rank, step):
        rows["num_nan"][3] = 7 if step == 4 else 0

    plan = LoadPlan(num_sites=10, num_steps=6, steps_per_batch=6, every=5)
    (body,) = RankStream(plan, change=change)
    batch = decode_batch(body.data)
    assert batch.step[batch.column("num_nan") == 7].tolist() == [4]
    assert body.num_records == 60


def test_a_healthy_fleet_is_found_healthy() -> None:
    plan = LoadPlan(num_ranks=2, num_sites=35, num_steps=150, steps_per_batch=10)
    engine = DetectionEngine(facts_of(plan.sites))
    for bodies in zip(*(RankStream(plan, rank) for rank in range(plan.num_ranks)), strict=True):
        for body in bodies:
            assert engine.observe(decode_batch(body.data)) == []


def test_sites_lie_in_the_order_of_the_data_and_hold_a_whole_sketch() -> None:
    sites = make_sites(70)
    assert sorted(s.order for s in sites) == list(range(70))
    assert len({s.id for s in sites}) == 70
    (body,) = RankStream(LoadPlan(num_sites=70, num_steps=1))
    measured = decode_batch(body.data).column("measured")
    assert all(int(m) == int(~Measured.HASH & Measured(255)) for m in measured)


def test_tile_maps_are_of_the_plan_too() -> None:
    stream = RankStream(LoadPlan(num_sites=10))
    assert stream.tile_maps(3, 2) == stream.tile_maps(3, 2)
