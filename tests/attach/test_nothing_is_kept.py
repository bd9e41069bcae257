"""What training has let go of is gone: outputs, operands, optimizers and models that only we would hold."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from canary.own_forward import ScriptFloat8Linear
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fp8watch.observer.recompute_values import MAX_KEPT, RecomputeValues


class Own(nn.Module):
    """A product with a parameter of its own, as GPT-2's layers have it; what reads the product keeps nothing of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32) * 0.1)

    def forward(self, x):
        y = x @ self.weight
        self.product = StorageWeakRef(y.untyped_storage())
        return y * 2.0


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x).sum()


def test_an_output_that_nobody_needs_is_gone_before_backward(attach):
    model = Model(Own())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = attach(model, recipe="observe", overhead_budget=None)
    for _ in range(3):
        loss = model(torch.randn(16, 64))
        assert model.part.product.expired()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _, rows = watch._recorder.step(1)
    assert rows["part", "grad_output", "columnwise"]["num_elements"] == 16 * 32


@pytest.mark.parametrize("backward", [True, False])
def test_what_a_turn_holds_is_gone_with_the_step(attach, backward):
    model = Model(ScriptFloat8Linear(64, 32))
    first = nn.Linear(64, 64)
    both = nn.Sequential(first, model)
    optimizer = torch.optim.SGD(both.parameters(), lr=1e-3)
    watch = attach(both, recipe="observe", overhead_budget=None)
    held = []
    for _ in range(4):
        x = torch.randn(16, 64)
        held.append(StorageWeakRef(x.untyped_storage()))
        if not backward:
            both(x)  # a forward in training mode whose result nobody uses: the turn is its
        both(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        del x
    assert watch._plan.turns == {}
    assert all(ref.expired() for ref in held)


def test_a_gradient_that_comes_in_a_later_step_is_of_no_turn(attach, monkeypatch):
    """As a loss that is kept over an optimizer step: what the turn held is gone by then."""
    model = nn.Sequential(nn.Linear(64, 64), Model(ScriptFloat8Linear(64, 32)))
    watch = attach(model, recipe="observe", overhead_budget=None)
    monkeypatch.setattr(watch._plan.canary, "is_turn", lambda row: True)  # in that step, too
    monkeypatch.setattr(watch._plan.canary, "takes", lambda row, what: True)
    assert watch._plan.turns == {}
    kept = model(torch.randn(16, 64))
    assert watch._plan.turns
    watch.step()
    kept.backward()
    watch.step()
    assert watch._plan.turns == {}
    assert not watch.summary()["internal_errors"]


def test_what_a_turn_holds_is_gone_with_the_watch(attach):
    model = Model(ScriptFloat8Linear(64, 32))
    watch = attach(model, recipe="observe", overhead_budget=None)
    x = torch.randn(16, 64)
    held = StorageWeakRef(x.untyped_storage())
    model(x).detach()
    del x
    assert not held.expired()
    watch.detach()
    assert held.expired()


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.cuda.OutOfMemoryError


def test_an_optimizer_whose_step_raised_is_let_go(attach):
    model = Model(nn.Linear(64, 32))
    attach(model, recipe="observe")
    optimizer = Broken(model.parameters(), lr=1e-3)
    model(torch.randn(16, 64)).backward()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_watch_whose_optimizers_step_in_backward_goes_with_its_model(attach):
    model = Model(nn.Linear(64, 32))
    recorder = attach(model, recipe="observe", keep=False)
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def update(p, optimizers=optimizers):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        model(torch.randn(16, 64)).backward()
    gone = weakref.ref(model)
    del model, p, optimizers, update
    gc.collect()
    assert gone() is None
    assert len(recorder.steps) >= 2


def test_first_passes_are_kept_while_they_can_be_compared():
    values = RecomputeValues(turn=frozenset({3}))
    for _ in range(10 * MAX_KEPT):
        values.keep(3, torch.randn(8, 8))
    assert len(values._kept[3]) == MAX_KEPT + 1
    values.again(3, torch.randn(8, 8))
    assert values.take() == {}, "none of these is known to be the first pass of it"
