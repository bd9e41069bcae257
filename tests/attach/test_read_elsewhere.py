"""Modules that are never called: whether their weights are read elsewhere is said where it was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.session import gradients_given
from fp8watch.session.silent_sites import HOLDS, READ_ELSEWHERE

K = 64


class Net(nn.Module):
    """One Linear is called, one is read, one has the weight of another, and nobody reads the last."""

    def __init__(self):
        super().__init__()
        self.q, self.places, self.twin, self.idle = nn.Linear(K, K), nn.Linear(K, 32), nn.Linear(K, K), nn.Linear(K, K)
        self.twin.weight, self.twin.bias = self.q.weight, self.q.bias

    def forward(self, x):
        return (self.q(x) + self.places.weight.sum(dim=0)).pow(2).mean()


def steps(model, num):
    """Gradients are zeros before the first step, and are set to zeros before the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(num):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(32, K)).backward()
        optimizer.step()


@pytest.fixture
def elsewhere(monkeypatch):
    """As if gradients lay on a device."""
    monkeypatch.setattr(gradients_given, "_on_host", lambda gradient: None)


def test_a_module_whose_weight_is_read_without_a_call_is_said_to_be_that(attach, capsys):
    watch = attach(Net(), recipe="observe")
    steps(watch._model, 2)
    said = capsys.readouterr().err
    assert f"not called as a module in the first step: idle ({HOLDS});" in said
    assert f"places ({READ_ELSEWHERE})" in said
    assert watch._recorder.facts["not_called"] == f"idle ({HOLDS})"
    assert watch._recorder.facts["silent"] == f"places ({READ_ELSEWHERE}); twin ({READ_ELSEWHERE})"


def test_without_a_gradient_nothing_is_said_of_one(attach, train):
    watch = attach(Net(), recipe="observe")
    train(watch._model, steps=2)
    assert watch._recorder.facts["not_called"] == "idle"


def test_on_a_device_a_hook_tells_and_is_taken_off(attach, elsewhere):
    model = Net()
    watch = attach(model, recipe="observe")
    steps(model, 1)
    assert watch._recorder.facts["not_called"] == f"places ({HOLDS}); idle ({HOLDS})"
    assert watch._recorder.facts["silent"] == f"twin ({READ_ELSEWHERE})"
    steps(model, 1)
    assert watch._recorder.facts["not_called"] == f"idle ({HOLDS})"
    assert watch._recorder.facts["silent"] == f"places ({READ_ELSEWHERE}); twin ({READ_ELSEWHERE})"
    steps(model, 3)
    assert watch._recorder.facts["not_called"] == f"idle ({HOLDS})"
    assert not any(p._backward_hooks for p in model.parameters())
    assert not watch.guard.errors


def test_no_hook_is_left_where_the_watch_ends(attach, elsewhere):
    model = Net()
    watch = attach(model, recipe="observe")
    steps(model, 1)
    assert model.places.weight._backward_hooks
    watch.detach()
    assert not any(p._backward_hooks for p in model.parameters())
