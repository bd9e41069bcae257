"""Full statistics have turns: each site once in N steps, no step a burst, each rank at another place."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from attach.deep_model import Deep

from fp8watch.numerics.tile_stats import HEAVY
from fp8watch.observer.nonfinite_checks import OUTPUTS_EVERY
from fp8watch.session.overhead_budget import FIRST_STEPS
from fp8watch.session.sampling_schedule import Schedule
from fp8watch.session.site_rotation import COMMON_EVERY, SiteRotation, Turns, light_units, rotating_units, weight_units
from fp8watch.session.sites import SlabSite
from fp8watch_agent.record import Measured, holds


def table(num_layers: int) -> list[SlabSite]:
    """Two Linears a layer, five sites each."""
    places = [("input", "rowwise"), ("input", "columnwise"), ("weight", "rowwise")]
    places += [("grad_output", "rowwise"), ("grad_output", "columnwise")]
    names = [f"layers.{i}.{name}" for i in range(num_layers) for name in ("fc1", "fc2")]
    sites = [(fqn, *place) for fqn in names for place in places]
    return [SlabSite(*site, "fprop", i, 64 if "fc1" in site[0] else 128) for i, site in enumerate(sites)]


@pytest.mark.parametrize("num_layers", [1, 7])
@pytest.mark.parametrize("every", [1, 2, 7, 37, 64])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (3, 8), (77, 512)])
def test_each_site_has_one_turn_in_n_steps_and_no_step_has_more_than_its_share(num_layers, every, rank, world_size):
    units = rotating_units(table(num_layers))
    turns = Turns(units, rank, world_size)
    rows = np.array([np.frombuffer(turns.of(step, every), np.uint8) for step in range(1000, 1000 + 3 * every)])
    assert (np.add.reduceat(rows, range(0, len(rows), every)) == 1).all()
    num_units = len(set(units.tolist()))
    busy = [len(set(units[row == 1].tolist())) for row in rows]
    assert max(busy) <= math.ceil(num_units / every)
    assert min(busy) >= num_units // every


def test_a_fleet_sees_each_site_in_each_step():
    units, every = rotating_units(table(3)), 16
    for world_size in (16, 40):
        ranks = [Turns(units, rank, world_size) for rank in range(world_size)]
        for step in range(100, 100 + every):
            seen = np.sum([np.frombuffer(rank.of(step, every), np.uint8) for rank in ranks], axis=0)
            assert seen.min() >= world_size // every
            assert seen.max() <= math.ceil(world_size / every)


def test_few_ranks_are_as_far_apart_as_they_can_be():
    units = rotating_units(table(1))
    first = [next(s for s in range(64) if Turns(units, rank, 4).of(s, 64)[0]) for rank in range(4)]
    assert first == [0, 16, 32, 48]


def test_both_directions_and_inputs_side_by_side_have_their_turn_together():
    names = [("attn.q", 64), ("attn.k", 64), ("mlp.down", 256), ("mlp.gate", 64), ("layers.0", 64), ("layers.1", 64)]
    sites = [
        SlabSite(fqn, operand, direction, "fprop", 0, width)
        for fqn, width in names
        for operand, direction in (("input", "rowwise"), ("input", "columnwise"), ("weight", "rowwise"))
    ]
    units = rotating_units(sites).tolist()
    inputs = {fqn: units[3 * i : 3 * i + 2] for i, (fqn, _) in enumerate(names)}
    assert all(row == column for row, column in inputs.values())
    assert inputs["attn.q"] == inputs["attn.k"]
    assert len({tuple(rows) for rows in inputs.values()}) == 5
    assert len({units[3 * i + 2] for i in range(len(names))}) == len(names)
    together = rotating_units(sites, [[0, 1, 2], [3, 4, 5]]).tolist()
    assert together[:6] == [0, 0, 0, 1, 1, 1]


def test_outputs_are_read_less_often_on_a_device_and_parameters_have_their_turn():
    units = rotating_units(table(2))

    def looks(late: bool, every: int) -> list[int]:
        rotation = SiteRotation(units, units, units, Schedule(), ("triggered", 0), late=late)
        samples = [rotation.sample(step, every, 1, first=False, full=False, outputs=False) for step in range(64)]
        assert sorted({s.gradients for s in samples}) == [
            (i, samples[0].gradients[1]) for i in range(samples[0].gradients[1])
        ]
        return [sum(s.outputs[row] for s in samples) for row in range(len(units))]

    assert set(looks(late=False, every=4)) == {16}
    assert set(looks(late=True, every=4)) == {64 // OUTPUTS_EVERY}
    assert set(looks(late=True, every=32)) == {2}


@pytest.mark.parametrize("light_every", [2, 8, 16])
def test_where_light_rows_have_turns_too_all_of_a_linear_is_looked_at_together_and_its_other_turns_are_among_them(
    light_every,
):
    sites = table(4)
    weights = weight_units(sites, lambda row: sites[row].operand == "weight")
    linears = light_units(sites)
    rotation = SiteRotation(rotating_units(sites), weights, linears, Schedule(), ("every", 48), rank=1, world_size=2)
    of = [rotation.sample(s, 64, light_every, first=False, full=False, outputs=False) for s in range(640, 704)]
    rows = range(len(sites))
    light, full, outputs, hashes, maps = (
        np.array([[getattr(s, name)[row] for row in rows] for s in of], dtype=bool)
        for name in ("light", "full", "outputs", "hashes", "maps")
    )
    assert not ((full | outputs | maps) & ~light).any()
    assert (full.sum(axis=0) == 1).all()
    assert (outputs.sum(axis=0) == 1).all()
    assert full.sum(axis=1).max() <= len(sites) // 4
    of_linear = light.reshape(64, -1, 5)  # five rows each
    assert (of_linear.min(axis=2) == of_linear.max(axis=2)).all()
    assert (light.sum(axis=0) >= 64 // light_every).all()
    assert light.sum() <= 64 * len(sites) / light_every + 5 * maps.sum()
    assert hashes.sum() == 2 * 8
    for everything in ({"first": True}, {"full": True}, {"outputs": True}):
        flags = {"first": False, "full": False, "outputs": False} | everything
        assert all(rotation.sample(640, 64, light_every, **flags).light[row] for row in rows)


@pytest.mark.parametrize("light_every", [1, 16])
def test_ranks_that_share_scales_look_at_each_site_in_one_step_whatever_their_turns(light_every):
    sites = table(4)
    units, linears = rotating_units(sites), light_units(sites)

    def looks(rank: int, every: int, common: bool) -> np.ndarray:
        of_rank = SiteRotation(units, units, linears, Schedule(), ("triggered", 0), rank=rank, world_size=4)
        flags = {"first": False, "full": False, "outputs": False, "common": common}
        of = [of_rank.sample(s, every, light_every, **flags) for s in range(2 * COMMON_EVERY)]
        full, light = (
            np.array([[getattr(s, name)[row] for row in range(len(sites))] for s in of]) for name in ("full", "light")
        )
        assert not (full & ~light.astype(bool)).any()
        return full.astype(bool)

    for common in (True, False):
        together = looks(0, 32, common) & looks(1, 32, common) & looks(2, 48, common) & looks(3, 64, common)
        assert together.sum(axis=0).min() >= 2 * common
        assert together.any() == common
    assert looks(0, 32, True).sum() <= 1.5 * looks(0, 32, False).sum()


def test_linears_that_read_one_tensor_are_looked_at_in_the_same_step():
    sites = [SlabSite(f"attn.{name}", o, "rowwise", "fprop", 0, 64) for name in "qkv" for o in ("input", "weight")]
    sites += [SlabSite("norm", "output", "rowwise", "probe", 0, 64)]
    assert light_units(sites).tolist() == [0] * 6 + [1]


def test_what_is_followed_is_full_with_all_that_has_its_turn_with_it():
    sites = table(4)
    units = rotating_units(sites)
    rotation = SiteRotation(units, units, units, Schedule(), ("triggered", 0))
    row = next(i for i, site in enumerate(sites) if site.operand == "input")
    unit = set(np.flatnonzero(units == units[row]).tolist())
    assert len(unit) > 1
    for step in range(64):
        alone, followed = (
            rotation.sample(step, 64, 1, first=False, full=False, outputs=False, followed=rows) for rows in ((), (row,))
        )
        full = {i for i in range(len(sites)) if followed.full[i]}
        assert full == unit | {i for i in range(len(sites)) if alone.full[i]}
        assert followed.any_full


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_hashed_whatever_the_turns(attach, compiled):
    model = Deep()
    watch = attach(model, recipe="observe", overhead_budget=None, hash_every=8)
    watch._overhead.light_every = 16
    called = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    hashed = []
    for _ in range(20):
        optimizer.zero_grad()
        called(torch.randn(32, 32)).backward()
        optimizer.step()
        rows = watch._recorder.step(-1)[1]
        hashed.append({site for site, row in rows.items() if holds(int(row["measured"]), Measured.HASH)})
        assert len(hashed) < 3 or len(rows) < 6 * 5
    assert len(hashed[0]) == 6
    assert len(set().union(*hashed[2:10])) == len(set().union(*hashed[10:18])) == 6


def train(attach, num_steps=40, **kwargs):
    """Turns are counted by the `every` that is asked for: no step is measured, and none of those shows everything."""
    kwargs.setdefault("overhead_budget", None)
    torch.manual_seed(0)
    model = Deep()
    watch = attach(model, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).backward()
        optimizer.step()
    assert not watch.guard.errors
    rows = np.array([r["measured"] for _, _, r, *_ in watch._recorder.steps])
    return watch, rows, model


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "nvfp4", "observe"])
def test_in_each_step_some_sites_are_full_and_all_are_light(attach, recipe):
    _, measured, _ = train(attach, every=8, recipe=recipe)
    full = np.array([holds(m, HEAVY) for m in measured])
    light = np.array([holds(m, Measured.COUNTS | Measured.AMAX) for m in measured])
    assert light.all()
    assert full[0].all(), "the first step shows what there is"
    for first in (8, 16, 24, 32):
        assert (full[first : first + 8].sum(0) == 1).all()
    assert full[8:].sum(1).max() <= 2 * math.ceil(full.shape[1] / 8)
    assert full[8:].any(1).all()


def test_ranks_are_at_different_places(attach, monkeypatch):
    monkeypatch.setenv("FP8WATCH_RUN", "one")
    monkeypatch.setenv("WORLD_SIZE", "8")
    of_ranks = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        _, measured, _ = train(attach, num_steps=10, every=8)
        of_ranks.append([holds(m, HEAVY) for m in measured[1:]])
    seen = np.array(of_ranks).sum(0)
    assert (seen == 1).all(), "each site in each step by one rank of eight"


def test_where_training_counts_steps_by_tens_each_site_has_its_turn_all_the_same(attach):
    torch.manual_seed(0)
    model = Deep()
    watch = attach(model, every=8, hash_every=8, overhead_budget=None)  # turns are counted
    for step in range(40):
        model(torch.randn(16, 32)).backward()
        watch.step(10 * step)
    measured = np.array([rows["measured"] for _, _, rows, *_ in watch._recorder.steps])[8:]
    full, hashed = (np.array([holds(m, group) for m in measured]) for group in (HEAVY, Measured.HASH))
    assert (full.sum(0) == 4).all()
    assert sorted(set(hashed.sum(0).tolist())) == [0, 4], "weights, and what is none"


def test_turns_change_no_number(attach):
    _, _, one = train(attach, every=1)
    _, _, other = train(attach, every=8)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_after_a_pause_the_first_step_shows_everything_again(attach):
    torch.manual_seed(0)
    model = Deep()
    watch = attach(model, every=100)
    for step in range(19):
        if step == 13:
            watch.pause()
        if step == 16:
            watch.resume()
        model(torch.randn(16, 32)).backward()
        watch.step()
    full = {int(h["step"]): bool(holds(rows["measured"], HEAVY).all()) for h, _, rows, *_ in watch._recorder.steps}
    assert full.keys() == {*range(13), 16, 17, 18}
    assert {step for step, is_full in full.items() if is_full} == {0, *FIRST_STEPS, 16}, "those are measured"


def test_what_a_gemm_puts_out_is_seen_in_its_turn_and_then_everywhere(attach, monkeypatch):
    """Finite operands, an output that is not: the site sees it in its turn, and from the step after that all look."""
    from fp8watch.kernels import emulated_gemm

    torch.manual_seed(0)
    model, right = Deep(), copy.copy(emulated_gemm.wgrad)
    watch = attach(model, every=8, overhead_budget=None)  # a measured step looks at all of them

    def wrong(*args):
        out = right(*args)
        out[0, 0] = math.inf
        return out

    for step in range(20):
        monkeypatch.setattr(emulated_gemm, "wgrad", wrong if step >= 3 else right)
        model.zero_grad()
        model(torch.randn(16, 32)).backward()
        watch.step()
    bad = [int((rows["num_nonfinite_outputs"] > 0).sum()) for _, _, rows, *_ in watch._recorder.steps]
    assert bad[:3] == [0, 0, 0]
    found = next(step for step, n in enumerate(bad) if n)
    assert found < 3 + 8
    assert all(n == 6 for n in bad[found + 1 :])
