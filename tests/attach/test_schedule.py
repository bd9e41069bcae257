"""Which steps and which sites are observed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fp8watch.numerics.tile_stats import HEAVY
from fp8watch.session.overhead_budget import FIRST_STEPS
from fp8watch_agent.record import FIELDS, Measured, holds

LOOKS = Measured.QUANTISER | Measured.GEMM | Measured.IMPACT
SAMPLED = HEAVY | Measured.GAIN
"""Of the canary: one module after the other has its turn."""


def observed(watch):
    return [int(h["step"]) for h, ids, *_ in watch._recorder.steps if len(ids)]


def test_windows_are_observed_and_the_scalars_of_all_steps_are_sent(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    watch = attach(mlp, windows=[(2, 4), (6, None)])
    losses = train(mlp, steps=8)
    assert observed(watch) == [2, 3, 6, 7]
    assert watch._recorder.losses() == pytest.approx(losses)
    attach(twin)
    assert train(twin, steps=8) == losses


def test_outside_of_windows_not_even_what_is_broken_is_measured(attach, mlp):
    watch = attach(mlp, windows=[(2, 4)])
    for step in range(3):
        x = torch.randn(32, 64)
        if step == 1:
            x[0, 0] = float("inf")
        mlp(x).backward()
        watch.step()
    assert observed(watch) == [2]


def sampled(watch):
    """Steps with full statistics of every site."""
    steps = [(int(h["step"]), watch._recorder.of_operands(ids, r)) for h, ids, r, *_ in watch._recorder.steps if len(r)]
    full = [(step, holds(rows["measured"], HEAVY)) for step, rows in steps]
    return [step for step, each in full if each.all()]


def test_every_samples_within_windows(attach, mlp, train):
    watch = attach(mlp, windows=[(3, 20)], every=4, overhead_budget=None)  # measured steps show everything as well
    train(mlp, steps=10)
    assert sampled(watch) == [3], "the first shows what there is; then each site has its turn"
    assert observed(watch) == list(range(3, 10))


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "mxfp8", "nvfp4", "observe"])
def test_between_samples_every_row_leaves_without_what_only_samples_measure(attach, mlp, train, recipe):
    """What is not measured is absent: its bits are not set, and its fields are at their defaults."""
    watch = attach(mlp, recipe=recipe, every=1000, hash_every=0)
    train(mlp, steps=5)
    full, light = watch._recorder.step(0)[1], watch._recorder.step(4)[1]
    assert set(light) == set(full)
    measured = [] if recipe == "observe" else [FIRST_STEPS[0]]
    assert sampled(watch) == [0, *measured], "the first, and one in which the cost is measured"
    for site, row in light.items():
        of_sample = int(full[site]["measured"])
        assert of_sample & SAMPLED == (Measured.ENERGIES if site[1] == "output" or site[0] == "lm_head" else SAMPLED)
        assert int(row["measured"]) == of_sample & ~SAMPLED & ~LOOKS
        assert row["num_elements"] > 0
        assert row["amax_max"] > 0
        assert row["amax_hist"].sum() == row["num_tiles"]
        for f in FIELDS:
            if f.group & SAMPLED:
                assert np.all(row[f.name] == f.default), f.name


def test_between_samples_probes_leave_without_an_energy(attach):
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    watch = attach(model, every=4, probes=["0"])
    for _ in range(3):
        model(torch.randn(32, 64)).sum().backward()
        watch.step()
    row = watch._recorder.step(2)[1]["0", "output", "rowwise"]  # the last of four units: its turn is step 3
    assert int(row["measured"]) == int(Measured.COUNTS | Measured.AMAX)
    assert row["signal_energy"] == 0
    assert row["amax_max"] > 0


@pytest.mark.parametrize("windows", [[(4, 4)], [(5, 2)], [(-1, 3)], [(None, 3)], [3], [(1, 2, 3)], [(0.5, 2)]])
def test_windows_without_a_step_are_refused(attach, mlp, windows):
    with pytest.raises(ValueError, match="windows"):
        attach(mlp, windows=windows)


def test_pause_and_resume(attach, mlp, train):
    watch = attach(mlp)
    train(mlp, steps=1)
    watch.pause()
    train(mlp, steps=2)
    watch.resume()
    train(mlp, steps=1)
    assert [int(h["step"]) for h, *_ in watch._recorder.steps] == [0, 3]
    assert {int(r["num_calls"]) for r in watch._recorder.step(1)[1].values()} == {1}


def test_sites_are_chosen_by_pattern(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    watch = attach(mlp, sites=["up", "*.grad_output.columnwise"])
    losses = train(mlp, steps=2)
    assert set(watch._recorder.step(1)[1]) == {
        ("up", "input", "rowwise"), ("up", "input", "columnwise"), ("up", "weight", "rowwise"),
        ("up", "grad_output", "columnwise"), ("down", "grad_output", "columnwise"),
    }  # fmt: skip
    attach(twin)
    assert train(twin, steps=2) == losses


def test_delayed_scales_follow_operands_that_are_not_observed(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    attach(mlp, recipe="delayed", sites=["up.input"])
    attach(twin, recipe="delayed")
    assert train(mlp, steps=4) == train(twin, steps=4)


@pytest.mark.parametrize(
    ("sites", "error"), [("up", TypeError), (["nowhere"], ValueError), ([3], TypeError), (["up", ""], TypeError)]
)
def test_sites_that_are_none_are_refused(attach, mlp, sites, error):
    with pytest.raises(error, match="sites="):
        attach(mlp, sites=sites)
