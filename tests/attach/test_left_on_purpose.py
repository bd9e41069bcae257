"""Gradients that stay in `.grad` on purpose: of layers that no optimizer steps with, and while autograd gives others elsewhere."""

from __future__ import annotations

import gc

import pytest
import torch
from attach.stepped import DIM, Deep, adam, steps

from fp8watch.session import update_turns
from fp8watch.session.gradients_left import GradientsLeft
from fp8watch_agent.guard import Guard
from fp8watch_agent.update_names import GRADIENTS_LEFT, OF, OPTIMIZER, REPEATED


@pytest.fixture(autouse=True)
def each_step(monkeypatch):
    """A turn takes a larger share of a step than is allowed, in models of this size."""
    monkeypatch.setattr(update_turns, "COST_SHARE", 1e9)


def news(watch):
    return [{k: v for k, v in logs.items() if k.startswith((OPTIMIZER, OF))} for *_, logs, _ in watch._recorder.steps]


class Heads(torch.nn.Module):
    """A body and three heads; returns their losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM) for _ in range(3)))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.body(x))
        return [(head(x) - 1).square().mean() for head in self.heads]


def aside(model, optimizer, num, *, clear=True, to_none=True):
    """Training in which the gradients of some losses are asked for by themselves, before those of the step before are cleared."""
    x = torch.randn(8, DIM)  # gradients are along those of the step before
    for _ in range(num):
        losses = model(x)
        norms = [torch.autograd.grad(loss, model.body[2].weight, retain_graph=True)[0].norm() for loss in losses[:1]]
        if clear:
            optimizer.zero_grad(set_to_none=to_none)
        (sum(losses) / norms[0]).backward()
        optimizer.step()


@pytest.mark.parametrize("to_none", [True, False], ids=["set to none", "set to 0"])
def test_gradients_that_are_asked_for_before_others_are_cleared_leave_none(attach, to_none):
    model = Heads()
    watch = attach(model, recipe="observe", every=16)  # a backward is heard of at the fourth module that ran
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    aside(model, optimizer, 48, to_none=to_none)
    assert news(watch) == [{}] * 48
    assert not watch.guard.errors
    assert not any(p._backward_hooks for p in model.parameters())


def test_gradients_that_are_asked_for_and_nobody_clears_the_others(attach):
    model = Heads()
    watch = attach(model)
    aside(model, adam(model), 24, clear=False)
    said = [s.get(GRADIENTS_LEFT) for s in news(watch)]
    assert said[:1] == [None]
    assert said.count(1.0) >= 18, (
        "the first module that a backward is heard of may come behind the gradient that is followed"
    )
    assert not watch.guard.errors


@pytest.mark.parametrize("cleared", [True, False])
def test_a_backward_that_is_heard_behind_what_it_added(cleared):
    model, guard = torch.nn.Linear(16, 16, bias=False), Guard()
    optimizer, left, x = torch.optim.SGD(model.parameters()), GradientsLeft(model, guard), torch.randn(4, 16)
    model(x).square().sum().backward()
    left.after(optimizer, looks=True)
    left.backward_begins()  # of a gradient that goes elsewhere
    if cleared:
        optimizer.zero_grad(set_to_none=False)
    for _ in range(2):  # micro-batches
        model(x).square().sum().backward()
        left.backward_begins()
    assert left.before(optimizer).get(GRADIENTS_LEFT) == (None if cleared else 1)
    assert not model.weight._backward_hooks
    assert not guard.errors


def test_no_hook_is_put_where_gradients_are_cleared_and_none_stays():
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer, left = torch.optim.SGD(model.parameters()), GradientsLeft(model, Guard())
    for end in (lambda: left.after(optimizer, looks=False), lambda: left.before(optimizer), left.stop):
        for cleared in (True, False):
            model(torch.randn(4, 16)).sum().backward()
            left.after(optimizer, looks=True)
            if cleared:
                optimizer.zero_grad()
            left.backward_begins()
            assert bool(model.weight._backward_hooks) is not cleared
            end()
            assert not model.weight._backward_hooks


def test_no_hook_stays_behind_its_optimizer_nor_where_it_is_known_that_nothing_stays():
    model, guard = torch.nn.Linear(16, 16, bias=False), Guard()
    for gone in (True, False):
        optimizer, left = torch.optim.SGD(model.parameters()), GradientsLeft(model, guard)
        model(torch.randn(4, 16)).sum().backward()
        left.after(optimizer, looks=True)
        left.backward_begins()
        assert model.weight._backward_hooks
        if gone:
            del optimizer
            gc.collect()
        else:
            model.weight.grad = None
            model(torch.randn(4, 16)).sum().backward()
        assert not model.weight._backward_hooks
        left.stop()
    assert not guard.errors


def layers_stay(model, optimizer, num, *, frozen, out, at_step=10, before=None):
    """Training in which behind a step the layers 1 and 2 are frozen, and taken `out` of the optimizer's groups; only what is trained is cleared."""
    [group], layers = optimizer.param_groups, [*model.layers[1].parameters(), *model.layers[2].parameters()]
    kept = {id(p) for p in layers}

    def at(step):
        for p in layers if step == at_step else ():
            p.requires_grad_(not frozen)
        if step == at_step and out:
            group["params"] = [p for p in group["params"] if id(p) not in kept]
        for p in group["params"]:
            if p.requires_grad:
                p.grad = None

    steps(model, optimizer, num, before=before, after=at, clear=False)


@pytest.mark.parametrize("make", [adam, lambda m: torch.optim.SGD(m.parameters(), lr=1e-2)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(("frozen", "at_step"), [(True, 10), (True, 11), (False, 10)])
def test_a_layer_that_was_taken_out_of_an_optimizer_keeps_its_gradient(attach, make, frozen, at_step):
    model = Deep()
    watch = attach(model)
    layers_stay(model, make(model), 40, frozen=frozen, out=True, at_step=at_step)
    assert news(watch) == [{}] * 40
    assert not watch.guard.errors


def test_beside_layers_that_were_taken_out_the_others_are_looked_at(attach):
    model, kept = Deep(), []
    watch, weight = attach(model), model.layers[3].weight

    def stale(step):
        kept[1:] = [] if step < 20 else [weight.grad.copy_(kept[0])]
        kept[:1] = [weight.grad.clone()]

    layers_stay(model, adam(model), 40, frozen=True, out=True, before=stale)
    said = [s for s in news(watch) if REPEATED in s]
    assert said
    assert all(s[f"{OF}layers.3.weight"] == 1 for s in said)


def test_a_gradient_that_is_left_as_its_layer_is_taken_out_is_added_to_and_not_stepped_with():
    model, guard = torch.nn.Linear(16, 16, bias=False), Guard()
    optimizer, left = torch.optim.SGD(model.parameters()), GradientsLeft(model, guard)
    model(torch.ones(4, 16)).sum().backward()
    left.after(optimizer, looks=True)
    optimizer.param_groups[0]["params"] = []
    left.backward_begins()
    model(torch.ones(4, 16)).sum().backward()
    assert left.before(optimizer) == {}
    assert not guard.errors


def test_a_layer_that_is_frozen_and_moves_with_its_last_gradient_is_named(attach):
    model = Deep()
    watch = attach(model)
    layers_stay(model, torch.optim.SGD(model.parameters(), lr=1e-2), 40, frozen=True, out=False)
    said = [s for s in news(watch) if REPEATED in s]
    assert said
    assert all(any(f"{OF}layers.{i}.weight" in s for i in (1, 2)) for s in said)


def test_a_layer_that_is_frozen_at_a_rate_of_0_repeats_its_gradient_and_says_nothing(attach):
    model = Deep()
    watch = attach(model)
    still = [*model.layers[1].parameters(), *model.layers[2].parameters()]
    rest = [p for p in model.parameters() if all(p is not other for other in still)]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": still, "lr": 0.0}], lr=1e-2)
    for step in range(24):
        for p in rest:
            p.grad = None
        steps(model, optimizer, 1, first=step, clear=False)
        for p in still:
            p.requires_grad_(False)
    assert not any(REPEATED in s for s in news(watch))
