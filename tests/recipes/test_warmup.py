"""The first steps in high precision: unquantised GEMMs, observed operands, and no second graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8watch import recipe as recipes


def losses_of_plain_training(model, train, steps):
    return train(copy.deepcopy(model), steps=steps)


@pytest.mark.parametrize("make", [recipes.blockwise, recipes.current, recipes.delayed, recipes.mxfp8, recipes.nvfp4])
def test_warm_up_is_high_precision_and_then_fp8(attach, mlp, train, capsys, make):
    plain = losses_of_plain_training(mlp, train, 5)
    twin = copy.deepcopy(mlp)
    watch = attach(mlp, recipe=make(warmup_steps=3))
    losses = train(mlp, steps=5)
    assert losses[:3] == pytest.approx(plain[:3], rel=1e-6)
    assert abs(losses[3] / plain[3] - 1) > 1e-6
    said = capsys.readouterr().err
    assert "after 3 steps in high precision" in said
    assert f"warm-up over: GEMMs compute in FP8 ({make().name}) from step 3" in said
    rows = watch._recorder.step(0)[1]
    num = {"blockwise": 9, "current": 6, "delayed": 6, "mxfp8": 10, "nvfp4": 9}
    assert len(rows) == num[make().name] + 2  # the head, and what it is given
    assert all(int(r["num_elements"]) > 0 for r in rows.values())
    assert watch._recorder.session.facts["warmup_steps"] == 3
    late = attach(twin, recipe=make(warmup_steps=3), start_step=3)
    assert not late._plan.step.warming


def test_histories_fill_meanwhile(attach, mlp, train):
    watch = attach(mlp, recipe=recipes.delayed(warmup_steps=2))
    train(mlp, steps=3)
    row = watch._recorder.step(2)[1]["up", "weight", "rowwise"]
    assert float(row["scale_ratio_max"]) > 0.5  # the first FP8 step has a scale that fits
    assert float(watch._recorder.step(0)[1]["up", "weight", "rowwise"]["scale_inv_max"]) == 1.0


@pytest.mark.parametrize("make", [recipes.blockwise, recipes.delayed])
def test_it_ends_at_the_same_step_without_statistics(attach, mlp, train, monkeypatch, make):
    twin = copy.deepcopy(mlp)
    attach(mlp, recipe=make(warmup_steps=2))
    want = train(mlp, steps=4)
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    silent = attach(twin, recipe=make(warmup_steps=2))
    assert train(twin, steps=4) == want
    assert silent._recorder is None
    assert not silent._plan.step.warming


def test_a_watch_that_nobody_keeps_ends_its_warm_up_too(attach, mlp, train, monkeypatch):
    import gc

    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    attach(mlp, recipe=recipes.current(warmup_steps=2), keep=False)
    gc.collect()
    plain = losses_of_plain_training(mlp, train, 4)
    losses = train(mlp, steps=4)
    assert losses[:2] == pytest.approx(plain[:2], rel=1e-6)
    assert abs(losses[3] / plain[3] - 1) > 1e-6


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_one_graph_serves_both(attach):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        attach(model, recipe=recipes.delayed(warmup_steps=2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    runs = torch.compile(compiled, fullgraph=True, backend=counter)
    x = torch.randn(32, 64)
    for model, call in ((eager, eager), (compiled, runs)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            call(x).pow(2).mean().backward()
            optimizer.step()
    assert counter.frame_count == 1
    assert torch.equal(eager[0].weight, compiled[0].weight)


def test_a_step_number_given_by_hand_counts(attach, mlp):
    watch = attach(mlp, recipe=recipes.current(warmup_steps=10))
    mlp(torch.randn(8, 64)).backward()
    watch.step(4)
    assert watch._plan.step.warming
    mlp(torch.randn(8, 64)).backward()
    watch.step(9)
    assert not watch._plan.step.warming
