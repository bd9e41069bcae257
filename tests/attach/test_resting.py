"""Linears and probes of which nothing is looked at in a step: what they cost, and that steps end and training is seen all the same."""

from __future__ import annotations

import pytest
import torch
from attach.deep_model import Deep
from torch import nn

from fp8watch.observer.site_rows import WEIGHT
from fp8watch.observer.step_sample import NO, YES, StepSample


def steps(model: nn.Module, num: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(32, 32)).backward()
        optimizer.step()


@pytest.fixture
def hooks(monkeypatch):
    """Tensors that got a hook on their gradient."""
    seen, real = [], torch.Tensor.register_hook
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda y, hook: seen.append(y) or real(y, hook))
    return seen


@pytest.mark.parametrize("how", ["paused", "outside"])
def test_few_that_rest_have_a_hook_and_steps_end(attach, hooks, how) -> None:
    model = Deep()
    windows = None if how == "paused" else [(1000, None)]
    watch = attach(model, recipe="observe", overhead_budget=None, windows=windows)
    if how == "paused":
        watch.pause()
    steps(model, 4)
    assert len(hooks) == 4 * 3, "in each pass the first, the second and the fourth of six"
    assert watch.summary()["num_steps"] == 4
    watch.resume()
    hooks.clear()
    if how == "paused":
        steps(model, 1)
        assert len(hooks) == 6
        assert len(watch._recorder.step(-1)[1]) >= 6 * 3


def test_a_pause_in_mid_step_is_heard(attach) -> None:
    model = Deep()
    watch = attach(model, recipe="observe", overhead_budget=None)
    watch.pause()
    steps(model, 2)
    model(torch.randn(32, 32)).backward()
    watch.resume()
    assert not watch._plan.slab.copy_rows()["num_calls"].any()
    model(torch.randn(32, 32)).backward()
    assert watch._plan.slab.copy_rows()["num_calls"].any()


def test_a_step_whose_first_linears_are_on_no_way_to_the_loss_is_seen_to_run_backward(attach) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aside, self.way = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), Deep()

        def forward(self, x):
            for layer in self.aside:
                layer(x)
            return self.way(x)

    model = Aside()
    watch = attach(model, recipe="observe", overhead_budget=None)
    watch.pause()
    model(torch.randn(32, 32)).backward()
    assert watch._plan.step.backward_seen
    assert watch._plan.step.num_passes == 1


def test_who_rests_follows_from_what_the_step_looks_at(attach) -> None:
    model = Deep()
    watch = attach(model, recipe="observe", overhead_budget=None, sites=["layers.2"])
    sites, each = watch._plan.sites, len(watch._plan.sites.rows)
    num = len(sites.quantizers)

    def rests(light=YES, hashes=NO):
        rows = sites.resting(StepSample(NO, NO, hashes, NO, any_full=False, any_outputs=False, light=light))
        return [i for i in range(6) if rows[each * i]]

    assert rests() == [0, 1, 3, 4, 5]
    assert rests(light=bytes(num)) == [0, 1, 2, 3, 4, 5]
    hashed = bytearray(num)
    hashed[each * 4 + sites.rows[WEIGHT, False]] = 1
    assert rests(hashes=bytes(hashed)) == [0, 1, 3, 5]
    assert rests(hashes=YES) == []


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_where_gemms_read_codes_none_rests(attach, recipe) -> None:
    model = Deep()
    watch = attach(model, recipe=recipe, overhead_budget=None)
    watch._overhead.light_every = 16
    steps(model, 3)
    assert watch._plan.resting is NO


@pytest.mark.parametrize("frozen", [0, 3, 5])
def test_steps_end_where_only_the_last_linears_train(attach, frozen) -> None:
    model = Deep()
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    watch = attach(model, recipe="observe", overhead_budget=None)
    watch.pause()
    steps(model, 4, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    assert watch.summary()["num_steps"] == 4


def test_probes_look_in_each_step_whoever_has_no_turn(attach) -> None:
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.LayerNorm(32), nn.Linear(32, 32))], Mean())
    watch = attach(model, recipe="observe", overhead_budget=None)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-2), []
    watch._overhead.light_every = 4
    for _ in range(8):
        steps(model, 1, optimizer)
        seen.append(watch._recorder.step(-1)[1])
    assert all(sum(site[1] == "output" for site in rows) == 4 for rows in seen)
    assert all(len({site[0] for site in rows if site[1] == "input"}) < 4 for rows in seen[4:])


class Mean(nn.Module):
    """A loss."""

    def forward(self, x):
        return x.square().mean()
