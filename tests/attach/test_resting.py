"""Linears and probes of which nothing is looked at in a step: what they cost, and that steps end and training is seen all the same."""

from __future__ import annotations

import pytest
import torch
from attach.deep_model import Deep
from torch import nn

from fp8watch.layers import own_gemms
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


class Returning(nn.Module):
    """A product with a parameter of its own, whose result is returned in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        y = x @ self.weight
        ids = torch.arange(3)
        return {"alone": y, "tuple": (ids, y), "dict": {"ids": ids, "hidden": [y]}, "weight": (self.weight, y)}[
            self.how
        ]


class Owners(nn.Module):
    """Some of them, one behind the other; returns a 0-d loss."""

    def __init__(self, how: str, num: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning(how) for _ in range(num))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y = y[-1] if isinstance(y, tuple) else y["hidden"][0] if isinstance(y, dict) else y
            x = x + torch.tanh(y)
        return x.square().mean()


@pytest.fixture
def looks(monkeypatch):
    """Forwards that were looked into."""
    seen, inner = [], own_gemms.GemmMode.__enter__
    monkeypatch.setattr(own_gemms.GemmMode, "__enter__", lambda self: (seen.append(self), inner(self))[1])
    return seen


@pytest.mark.parametrize("how", ["alone", "tuple", "dict", "weight"])
def test_forwards_with_own_products_that_rest_are_not_looked_into_and_steps_end(attach, looks, hooks, how) -> None:
    torch.manual_seed(0)
    model = Owners(how)
    watch = attach(model, recipe="observe", overhead_budget=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps(model, 1, optimizer)
    watch.pause()
    looks.clear()
    hooks.clear()
    steps(model, 4, optimizer)
    assert looks == []
    made = [y for y in hooks if not y.is_leaf]  # a gradient that is awaited has one on its parameter
    assert len(made) == (0 if how == "weight" else 4 * 3), "in each pass the first, the second and the fourth of four"
    assert not any(p._backward_hooks for p in model.parameters()), "hooks on a parameter would stay"
    assert watch.summary()["num_steps"] == 5
    assert watch.summary()["internal_errors"] == {}
    watch.resume()
    steps(model, 1, optimizer)
    assert len(looks) == 4
    assert len({site[0] for site in watch._recorder.step(-1)[1] if site[1] == "input"}) == 4


def test_own_products_have_turns_and_training_is_the_same_to_the_bit(attach, looks) -> None:
    def trained(*, watched: bool) -> tuple[list[torch.Tensor], list[set[str]]]:
        torch.manual_seed(0)
        model, seen = Owners("alone", 8), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if watched:
            watch = attach(model, recipe="observe", overhead_budget=None)
            watch._overhead.light_every = 4
        for _ in range(12):
            steps(model, 1, optimizer)
            if watched:
                seen.append({site[0] for site in watch._recorder.step(-1)[1] if site[1] == "grad_output"})
        return list(model.parameters()), seen

    (alone, _), (watched, seen) = trained(watched=False), trained(watched=True)
    assert all(map(torch.equal, alone, watched))
    assert set().union(*seen[-4:]) == {f"layers.{i}" for i in range(8)}
    assert all(len(sites) < 8 for sites in seen[4:])
    assert len(looks) < 12 * 8 / 2


def test_a_module_of_which_a_product_was_never_seen_does_not_rest(attach, looks) -> None:
    class Unused(Returning):
        def __init__(self) -> None:
            super().__init__("alone")
            self.other = nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x):
            y = super().forward(x)
            return y @ self.other if self.training and self.late else y

        late = False

    model = nn.Sequential(Unused(), Mean())
    watch = attach(model, recipe="observe", overhead_budget=None)
    watch.pause()
    steps(model, 3)
    assert len(looks) == 3
    model[0].late = True
    steps(model, 3)
    assert len(looks) == 4


class Mean(nn.Module):
    """A loss."""

    def forward(self, x):
        return x.square().mean()


@pytest.mark.parametrize("how", ["own weights", "Linears"])
def test_where_nothing_computes_in_fp8_all_have_turns_by_whatever_recipe(attach, looks, how) -> None:
    model = Owners("alone", 8) if how == "own weights" else Deep()
    watch = attach(model, overhead_budget=None)
    watch._overhead.light_every = 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps(model, 12, optimizer)
    assert watch._plan.as_they_are is (how == "own weights")
    assert watch._overhead._in_turns is (how == "own weights")
    if how == "own weights":
        assert len(looks) < 12 * 8 / 2
