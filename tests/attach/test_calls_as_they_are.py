"""What training calls, and how, reaches it as it is: Linears by keyword, closures with arguments, gradients wherever they lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8watch.observer.nonfinite_checks import gradients_of
from fp8watch.session import step_flush


class Projection(nn.Linear):
    """It calls what it takes by another name than torch does."""

    def forward(self, hidden, scale=1.0):
        return super().forward(hidden) * scale


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = Projection(64, 32)

    def forward(self, x):
        return self.projection(scale=0.5, hidden=x).pow(2).mean()


def train(model, num=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(num):
        loss = model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(seed=0):
    torch.manual_seed(seed)
    return ByKeyword()


def test_a_linear_with_its_own_forward_is_called_by_keyword(attach):
    alone, model = train(made()), made()
    watch = attach(model, recipe="observe", overhead_budget=None)
    assert train(model) == alone
    _, rows = watch._recorder.step(1)
    assert rows["projection", "input", "rowwise"]["num_elements"] == 16 * 64
    model.eval()
    assert model(torch.ones(1, 64)).isfinite()


class LineSearch(torch.optim.SGD):
    """Its closure may be asked for the loss alone. It is told from torch's own by its module."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure(backward=True)
        super().step()
        with torch.no_grad():
            self.behind = float(closure(backward=False))
        return loss


def test_a_closure_is_called_as_its_optimizer_calls_it(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    optimizer = LineSearch(model.parameters(), lr=1e-3)
    watch = attach(model, recipe="observe", overhead_budget=None)
    asked = []

    def closure(backward=True):
        asked.append(backward)
        optimizer.zero_grad()
        loss = model(torch.ones(16, 64)).pow(2).mean()
        if backward:
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert asked == [True, False] * 3
    assert watch.summary()["num_steps"] == 3
    assert not watch.summary()["internal_errors"]


class GivenTheModel(torch.optim.SGD):
    def step(self, model):
        assert isinstance(model, nn.Module)
        assert model.training
        return super().step()


def test_a_module_that_a_step_is_given_is_no_closure(attach):
    model = nn.Sequential(nn.Linear(64, 32))
    optimizer = GivenTheModel(model.parameters(), lr=1e-3)
    watch = attach(model, recipe="observe", overhead_budget=None)
    optimizer.step(model)  # before anything has run
    for _ in range(3):
        model(torch.ones(16, 64)).pow(2).mean().backward()
        optimizer.step(model)
    assert watch.summary()["num_steps"] == 3


def test_gradients_on_another_device_of_the_kind_are_left():
    def of(device):
        kept = torch.ones(2)
        gradient = SimpleNamespace(
            device=torch.device(device),
            is_sparse=False,
            is_floating_point=lambda: True,
            numel=lambda: 2,
            detach=lambda: kept,
        )
        return SimpleNamespace(grad=gradient)

    names, found = gradients_of([("here", of("cuda:0")), ("there", of("cuda:1"))], torch.device("cuda:0"))
    assert (names, len(found)) == (["here"], 1)


def test_a_look_at_gradients_that_fails_costs_no_step(attach, monkeypatch):
    model = made()
    watch = attach(model, recipe="observe", overhead_budget=None)

    def fails(_):
        raise RuntimeError("tensors are on two devices")

    monkeypatch.setattr(step_flush, "gradient_faults", fails)
    train(model)
    assert watch.summary()["num_steps"] == 4
    assert len(watch._recorder.steps) == 4
    assert set(watch.summary()["internal_errors"]) == {"gradients"}


def test_numbers_of_a_device_that_cannot_be_put_together_cost_no_step(attach, monkeypatch):
    model = made()
    watch = attach(model, recipe="observe", overhead_budget=None)

    def fails(_):
        raise RuntimeError("tensors are on two devices")

    split = step_flush.StepFlush._split
    monkeypatch.setattr(step_flush, "side_by_side", fails)
    monkeypatch.setattr(
        step_flush.StepFlush, "_split", lambda self, values: (split(self, values)[0], {"there": torch.ones(())})
    )
    losses = train(model)
    assert watch.summary()["num_steps"] == 4
    assert watch._recorder.losses() == pytest.approx(losses)
    assert set(watch.summary()["internal_errors"]) == {"values"}
