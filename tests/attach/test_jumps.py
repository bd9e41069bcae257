"""After a jump everything is looked at for some steps, whatever `every` says; a healthy run hardly has one."""

from __future__ import annotations

import copy
import math
from collections import Counter

import numpy as np
import pytest
import torch

from fp8watch.kernels import cpu_library
from fp8watch.numerics.tile_stats import HEAVY, LIGHT
from fp8watch.session import jumps, tile_map_flush
from fp8watch.session.event_follow import (
    APART_STEPS,
    BURST_STEPS,
    MAX_BURSTS,
    REFILL_STEPS,
    SLIGHT,
    TURN_STEPS,
    WHOLE_STEPS,
    EventFollow,
    Follow,
)
from fp8watch.session.jumps import Band, Bands, RowJumps, ScalarJumps
from fp8watch.session.overhead_budget import EARLY_STEPS
from fp8watch.session.row_glance import glance
from fp8watch.sketch.tile_cache import HISTORY_STEPS
from fp8watch_agent.record import QUANTISER_FAULTS, Measured, empty_rows, holds

SPREADS = np.repeat([0.01, 0.12, 0.9], 20)  # octaves from step to step: weights, inputs, gradients
WARM = 30


def shown(steps, *more):
    """Steps with full statistics of all sites: the first, those that are measured, and these."""
    return sorted({step for step in (0, *EARLY_STEPS) if step < steps} | set(more))


def healthy(num_steps, seed=0):
    """Light rows of 60 sites whose amax wanders."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = empty_rows(len(SPREADS))
        rows["measured"] = int(LIGHT)
        rows["order"] = np.arange(len(rows))
        rows["amax_max"] = np.exp2(0.01 * step + SPREADS * rng.standard_normal(len(rows)))
        rows["num_elements"] = rows["num_nonzero"] = 1 << 16
        rows["num_tiles"] = 512
        rows["num_underflow"] = rng.poisson(20 * SPREADS)
        yield rows


def scores(changed=None, num_steps=WARM + 1, seed=0):
    """Scores of the last step, which `changed` may alter."""
    seen, sound = RowJumps(len(SPREADS)), np.zeros(len(SPREADS), bool)
    for step, rows in enumerate(healthy(num_steps, seed)):
        if step == num_steps - 1 and changed is not None:
            changed(rows)
        score = seen.see(rows, sound)
    return score


@pytest.mark.parametrize("seed", range(3))
def test_healthy_sites_hardly_jump(seed):
    seen, sound = RowJumps(len(SPREADS)), np.zeros(len(SPREADS), bool)
    hits = [step for step, rows in enumerate(healthy(600, seed)) if (seen.see(rows, sound) > 1).any()]
    assert len(hits) <= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("amax_max", 2.0**10), ("amax_max", 0.0), ("num_underflow", 9000), ("num_saturated", 50), ("num_eps_tiles", 200)],
)
@pytest.mark.parametrize("site", [3, 25, 50])
def test_what_jumps_is_the_site_that_jumped(field, value, site):
    def change(rows):
        rows[field][site] = value

    assert np.flatnonzero(scores(change) > 1).tolist() == [site]


def test_a_site_jumps_by_its_own_measure():
    def by_two_octaves(rows):
        rows["amax_max"] *= 4

    jumped = scores(by_two_octaves) > 1
    assert jumped[:40].all(), "weights and inputs"
    assert not jumped[40:].any(), "gradients move by as much on an ordinary day"


def test_what_was_not_measured_or_is_broken_is_neither_judged_nor_learned():
    seen, sound = RowJumps(len(SPREADS)), np.zeros(len(SPREADS), bool)
    for step, rows in enumerate(healthy(WARM + 10)):
        broken = sound.copy()
        if step >= WARM:
            rows["measured"][3] = 0
            rows["amax_max"][3] = 0
            rows["amax_max"][25], broken[25] = math.inf, True
            rows["measured"][50] = int(Measured.COUNTS | Measured.AMAX | Measured.CODES)  # a cast that nobody saw
            rows["num_saturated"][50] = 99
        assert not (seen.see(rows, broken) > 1).any()
    (rows,) = healthy(1)
    assert not (seen.see(rows, sound)[[3, 25]] > 1).any(), "as before"


@pytest.mark.parametrize(
    ("numbers", "jumps_"),
    [
        ({"loss": 2.6, "grad_norm": 0.9}, False),
        ({"loss": 4.5, "grad_norm": 0.9}, True),
        ({"loss": 0.1, "grad_norm": 0.9}, True),
        ({"loss": 2.5, "grad_norm": 30.0}, True),
        ({"loss": 2.5, "grad_norm": 1e-10}, True),
        ({"grad_norm": 0.9}, False),
        ({}, False),
        ({"loss": math.nan, "grad_norm": math.inf}, False),
    ],
)
def test_the_loss_and_the_gradient_norm_jump(numbers, jumps_):
    seen, rng = ScalarJumps(), np.random.default_rng(0)
    for _ in range(WARM):
        assert not seen.see({"loss": 2.5 + 0.05 * rng.standard_normal(), "grad_norm": math.exp(0.2 * rng.normal())})
    assert seen.see(numbers) is jumps_


def test_bursts_are_rationed_whatever_jumps():
    follow, num_steps = Follow(), 4000
    begun = [step for step in range(num_steps) if follow.jumped(step)]
    assert min(np.diff(begun)) >= APART_STEPS
    assert MAX_BURSTS <= len(begun) <= MAX_BURSTS + num_steps // REFILL_STEPS + 1
    assert follow.full_until == begun[-1] + WHOLE_STEPS
    assert follow.burst_until == begun[-1] + BURST_STEPS


def slightly_out(rows, sites, times=1.2):
    """Move the amax of sites beyond their bands, but not far: bands allow so many octaves of these here."""
    rows["amax_max"][sites] *= 2 ** (times * max(1.5, 8 * 0.9))


@pytest.mark.parametrize(
    ("change", "slight"),
    [
        (lambda rows: slightly_out(rows, [45]), True),
        (lambda rows: slightly_out(rows, [45], times=2 * SLIGHT), False),
        (lambda rows: slightly_out(rows, slice(40, 60), times=0.9), False),
    ],
)
def test_a_slight_jump_is_followed_at_its_sites_alone(change, slight):
    events = EventFollow(len(SPREADS))
    for step, rows in enumerate(healthy(WARM + 1)):
        if step == WARM:
            change(rows)
        followed = events.look(step, step, rows, glance(rows), {"loss": 2.0})
    assert followed.begun
    assert followed.jumped
    assert 45 in followed.rows or not slight
    assert (events.follow.full_until < WARM) is (events.follow.burst_until < WARM) is slight
    assert events.follow.sites_until == WARM + BURST_STEPS
    if slight:
        assert followed.rows == [45], "and not the furthest out of those that are inside"
        assert not events.calm()[45]


def test_what_jumps_further_after_a_slight_jump_has_its_burst():
    follow = Follow()
    assert follow.jumped(100, slight=True)
    assert not follow.jumped(101, slight=True)
    assert follow.burst_until < 0
    assert follow.jumped(102)
    assert follow.full_until == 102 + WHOLE_STEPS
    assert follow.sites_until == follow.burst_until == 102 + BURST_STEPS
    assert not follow.jumped(110 + APART_STEPS // 2, slight=True), "behind a burst"
    assert follow.jumped(102 + APART_STEPS, slight=True)
    assert follow.sites_until > follow.burst_until


def test_slight_jumps_are_rationed_and_take_nothing_from_the_others():
    follow, num_steps = Follow(), 4000
    begun = [step for step in range(num_steps) if follow.jumped(step, slight=True)]
    assert min(np.diff(begun)) >= APART_STEPS
    assert MAX_BURSTS <= len(begun) <= MAX_BURSTS + num_steps // REFILL_STEPS + 1
    assert sum(follow.jumped(num_steps + APART_STEPS * i) for i in range(MAX_BURSTS)) == MAX_BURSTS


def test_a_break_needs_no_ration_and_what_stays_broken_begins_once():
    follow = Follow()
    assert follow.jumped(100)
    follow.broke(120, 120, fresh=True)
    assert follow.full_until == 120 + BURST_STEPS
    for step in range(121, 200):
        follow.broke(step, step, fresh=False)
    assert follow.full_until == 120 + BURST_STEPS
    assert follow.outputs_until > 199
    assert follow.jumped(12), "training went back: the steps begin anew"


def test_breaks_come_as_they_like_but_their_bursts_are_rationed():
    follow, num_steps, begun = Follow(), 2000, 0
    for step in range(0, num_steps, 4):
        before = follow.full_until
        follow.broke(step, step, fresh=True)
        begun += follow.full_until != before
        assert follow.outputs_until > step
    assert MAX_BURSTS <= begun <= MAX_BURSTS + num_steps // REFILL_STEPS + 1


def test_where_training_went_back_nothing_is_followed_any_more():
    follow = Follow()
    follow.broke(190, 190, fresh=True)
    follow.reached(191)
    assert follow.outputs_until > 191
    follow.reached(0)
    assert follow.outputs_until < 0
    assert follow.full_until < 0
    assert follow.burst_until < 0
    assert follow.sites_until < 0


def test_a_jump_takes_nothing_from_the_burst_of_a_break():
    follow = Follow()
    follow.broke(100, 100, fresh=True)
    assert not follow.jumped(110), "one is on"
    assert follow.jumped(100 + APART_STEPS)
    follow.broke(100 + APART_STEPS + 2, 100 + APART_STEPS + 2, fresh=True)
    assert follow.full_until == follow.burst_until == 100 + APART_STEPS + 2 + BURST_STEPS


def train(watch, model, num_steps, change=lambda step, x: x, seed=0, **log):
    torch.manual_seed(seed)
    for step in range(num_steps):
        x = change(step, torch.randn(32, 64))
        model(x).backward()
        if log:
            watch.log(**{name: value(step) for name, value in log.items()})
        watch.step()


def heavy_rows(watch):
    """Of each step which of its rows are in full."""
    return {
        int(h["step"]): holds(watch._recorder.of_operands(ids, rows)["measured"], HEAVY)
        for h, ids, rows, *_ in watch._recorder.steps
        if len(rows)
    }


def full_steps(watch):
    """Steps with full statistics of every site; between them each has its turn."""
    return [step for step, full in heavy_rows(watch).items() if full.all()]


def full_turns(watch, steps):
    """(module, operand) -> in how many of these steps it is in full."""
    names = {site.id: (site.module, site.operand) for site in watch._recorder.sites}
    found = Counter()
    for header, ids, rows, *_ in watch._recorder.steps:
        if int(header["step"]) in steps:
            found.update({names[int(i)] for i, full in zip(ids, holds(rows["measured"], HEAVY), strict=True) if full})
    return found


def test_full_statistics_and_maps_follow_a_jump(attach, mlp):
    watch = attach(mlp, every=64, hash_every=0)
    at = EARLY_STEPS[-1] + 8

    def outlier(step, x):
        if step == at:
            x[:, 7] *= 3000
        return x

    train(watch, mlp, at + BURST_STEPS + 8, outlier)
    assert not watch.guard.errors
    assert full_steps(watch) == shown(at + BURST_STEPS + 8, *range(at + 1, at + 1 + WHOLE_STEPS))
    behind = range(at + 1 + WHOLE_STEPS, at + 1 + BURST_STEPS)
    turns = full_turns(watch, behind)
    by_id = {s.id: (s.module, s.operand, s.direction) for s in watch._recorder.sites}
    jumped = {by_id[m.site][:2] for m in watch._recorder.maps if m.step in behind}
    assert ("up", "input") in jumped
    assert {turns[site] for site in jumped} == {len(behind)}, "sites that jumped, in each step"
    assert {n for site, n in turns.items() if site not in jumped} == {len(behind) // TURN_STEPS}
    steps = sorted(m.step for m in watch._recorder.maps if by_id[m.site] == ("up", "input", "rowwise"))
    assert steps == list(range(at - HISTORY_STEPS, at + BURST_STEPS + 1))
    assert at + 1 in watch._recorder.hurried, "the step of the jump does not wait for others"


@pytest.mark.parametrize("light_every", [1, 16])
def test_the_sites_of_a_slight_jump_are_in_full_whatever_the_turns(attach, mlp, light_every, monkeypatch):
    watch, at = attach(mlp, every=64, recipe="observe", overhead_budget=None, hash_every=0), 40
    watch._overhead.light_every = light_every
    see = RowJumps.see

    def slight(self, rows, broken):
        score = see(self, rows, broken)
        if watch._cycle.step == at:
            score[:1] = 1.5
        return score

    monkeypatch.setattr(RowJumps, "see", slight)
    train(watch, mlp, at + BURST_STEPS + 8)
    assert not watch.guard.errors
    first = watch._recorder.sites[0]
    turns = full_turns(watch, range(at + 1, at + 1 + BURST_STEPS))
    assert turns.pop((first.module, first.operand)) == BURST_STEPS
    assert max(turns.values(), default=0) <= 1, "others have their turns as ever"


def test_sites_that_are_only_observed_have_their_turns_in_a_burst_as_soon(attach, mlp):
    watch, at = attach(mlp, every=64, recipe="observe", overhead_budget=None), 40
    watch._overhead.light_every = 16  # as where reading operands takes more than the budget
    train(watch, mlp, at + BURST_STEPS + 8, loss=lambda step: 9.0 if step == at else 2.0 + 0.01 * (step % 3))
    assert not watch.guard.errors
    turns = full_turns(watch, range(at + 1 + WHOLE_STEPS, at + 1 + BURST_STEPS))
    assert len(turns) == 6, "three operands of two Linears"
    assert set(turns.values()) == {(BURST_STEPS - WHOLE_STEPS) // TURN_STEPS}


def test_a_jump_of_a_loss_that_comes_late_is_followed_from_where_it_is_known(attach, mlp):
    watch, at = attach(mlp, every=64), 30
    train(watch, mlp, 60, grad_norm=lambda step: torch.tensor(50.0 if step == at else 1.0 + 0.1 * (step % 3)))
    assert full_steps(watch) == shown(60, *range(at + 1, at + 1 + WHOLE_STEPS))
    assert {m.step for m in watch._recorder.maps} >= {at, at + 1, at + BURST_STEPS}


def test_healthy_steps_are_followed_by_nothing(attach, mlp):
    watch = attach(mlp, every=64)
    train(watch, mlp, 100)
    assert full_steps(watch) == shown(100)
    assert not watch._recorder.maps


def test_full_statistics_follow_a_break_once(attach, mlp):
    watch = attach(mlp, every=64)

    def inf(step, x):
        if step in range(20, 50):
            x[3, 5] = math.inf
        return x

    train(watch, mlp, 60, inf)
    assert full_steps(watch) == shown(60, *range(21, 21 + BURST_STEPS))


def test_the_maps_of_a_jump_stay_within_their_bytes(attach, mlp, monkeypatch):
    monkeypatch.setattr(tile_map_flush, "MAX_BURST_BYTES", 3 * 11 * 32)
    watch = attach(mlp, every=64)
    train(watch, mlp, 50, lambda step, x: x * 3000 if step == 30 else x)
    assert watch._recorder.maps
    assert sum(m.amax.size for m in watch._recorder.maps) <= 3 * 32


def test_a_window_is_not_left_for_a_jump(attach, mlp):
    watch = attach(mlp, every=64, windows=[(0, 33)])
    train(watch, mlp, 40, lambda step, x: x * 3000 if step == 30 else x)
    assert full_steps(watch) == shown(33, 31, 32)


def test_looking_for_jumps_fails_without_harm(attach, mlp, monkeypatch):
    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(jumps.RowJumps, "see", broken)
    watch = attach(mlp)
    train(watch, mlp, 3)
    assert [int(h["step"]) for h, *_ in watch._recorder.steps] == [0, 1, 2]
    assert watch.guard.errors == {"jumps": 3}


def test_of_many_sites_the_first_and_the_furthest_are_followed():
    score = np.array([0.1, 1.2, 3.0, 1.1, 9.0, 1.3, 0.0], np.float32)
    order = np.array([0, 5, 4, 1, 6, 2, 3], np.int32)
    assert jumps.most_telling(score, order, 4) == [3, 5, 4, 2]
    assert jumps.most_telling(np.array([0.1, 0.0, 0.3], np.float32), order[:3], 2) == [2, 0]


# One call of the C library stands for forty of numpy: the same answers, whichever is there.


def eventful(seed, num_steps=60):
    """Light rows of which some jump, are not there, or broke."""
    rng = np.random.default_rng(seed)
    for step, rows in enumerate(healthy(num_steps, seed)):
        rows["num_zero_tiles"], rows["num_eps_tiles"] = rng.integers(0, 4, (2, len(rows)))
        rows["num_saturated"] = rng.poisson(0.2, len(rows))
        jumps_now = rng.random(len(rows)) < 0.02
        rows["amax_max"][jumps_now] *= np.exp2(rng.uniform(-12, 12, jumps_now.sum()))
        rows["num_underflow"][jumps_now] *= 50
        rows["measured"][rng.random(len(rows)) < 0.1 * (step % 3 > 0)] = 0
        rows["measured"][rng.random(len(rows)) < 0.05] |= int(Measured.CODES)
        rows["amax_max"][rng.random(len(rows)) < 0.02] = 0.0
        for name in ("num_nan", "num_inf", "num_off_scale_tiles", "num_sentinel_tiles"):
            rows[name][rng.random(len(rows)) < 0.01] = 3
        if step % 7 == 3:
            name = ("num_nonfinite_outputs", *QUANTISER_FAULTS)[step // 7 % 5]
            rows[name][step % len(rows)] = 1
        yield rows


@pytest.fixture
def no_library(monkeypatch):
    return lambda: monkeypatch.setattr(cpu_library, "library", None)


@pytest.mark.parametrize("seed", range(3))
def test_scores_and_bands_are_those_of_numpy(seed, no_library):
    assert cpu_library.load() is not None
    found = {}
    for which in ("library", "numpy"):
        if which == "numpy":
            no_library()
        seen, said = RowJumps(len(SPREADS)), []
        for rows in eventful(seed):
            first = glance(rows)
            said.append((seen.see(rows, first.broken), first.broken, first[1:]))
        found[which] = seen, said
    for mine, numpys in zip(found["library"][1], found["numpy"][1], strict=True):
        np.testing.assert_allclose(mine[0], numpys[0], rtol=2e-5, atol=1e-6)
        assert np.array_equal(mine[1], numpys[1])
        assert mine[2] == numpys[2]
    assert any(score.max() > 1 for score, *_ in found["numpy"][1])
    for answers in zip(*(more for *_, more in found["numpy"][1]), strict=True):
        assert set(answers) == {True, False}
    for name in ("_middle", "_spread", "_count"):
        mine, numpys = (getattr(found[which][0]._bands, name) for which in ("library", "numpy"))
        np.testing.assert_allclose(mine, numpys, rtol=2e-5, atol=1e-5)


def test_a_number_by_itself_has_the_band_that_it_has_among_others():
    one, many, rng = Band(), Bands([0.05]), np.random.default_rng(0)
    for step in range(80):
        value = float(2 + 0.01 * rng.standard_normal() + (1.0 if step in (5, 40, 41) else 0.0))
        score = one.see(value, 0.05)
        assert score == pytest.approx(
            float(many.see(np.array([value], np.float32), np.array([True]))[0]), rel=2e-4, abs=1e-5
        )
        assert (score > 1) is (step in (40, 41))


def test_a_loss_that_is_not_finite_is_neither_a_jump_nor_learned():
    seen, rng = ScalarJumps(), np.random.default_rng(0)
    calm = [seen.see({"loss": 2 + 0.01 * rng.standard_normal(), "grad_norm": 1.0}) for _ in range(30)]
    assert not any(calm)
    assert not seen.see({"loss": math.nan, "grad_norm": 1.0})
    assert seen.see({"loss": 2.6, "grad_norm": 1.0})
    assert seen.see({"loss": 2.0, "grad_norm": 9.0})


def test_a_copy_has_bands_of_its_own():
    assert cpu_library.load() is not None
    seen, sound = RowJumps(len(SPREADS)), np.zeros(len(SPREADS), bool)
    for rows in healthy(WARM):
        seen.see(rows, sound)
    other, before = copy.deepcopy(seen), seen._bands._middle.copy()
    rows["amax_max"] *= 2
    other.see(rows, sound)
    assert np.array_equal(seen._bands._middle, before)
    assert not np.array_equal(other._bands._middle, before)


def test_rows_that_lie_apart_are_read_by_numpy():
    assert cpu_library.load() is not None
    (rows,) = healthy(1)
    rows["num_nan"][::2] = 1
    assert np.array_equal(glance(rows[::2]).broken, np.ones(len(SPREADS) // 2, bool))
    assert np.array_equal(glance(rows[1::2]).broken, np.zeros(len(SPREADS) // 2, bool))
