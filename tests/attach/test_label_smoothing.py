"""The loss that transformers' Trainer computes behind the model, on its LabelSmoother in small; the real one is in tests/stacks."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from attach.stepped import DIM, adam
from torch import nn

from fp8watch.session.label_smoothing import MODULE, NAME


class LabelSmoother:
    """Uniform targets: only what it returns counts here."""

    def __call__(self, outputs, labels, shift_labels=False, num_items_in_batch=None):
        loss = -outputs["logits"].log_softmax(-1).mean(-1)
        return loss.mean() if num_items_in_batch is None else loss.sum() / num_items_in_batch


class Logits(nn.Module):
    """Returns a loss where it is given labels, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = {} if labels is None else {"loss": logits.square().mean()}
        return {"logits": logits, **loss}


@pytest.fixture
def smoother(monkeypatch):
    """In the module of transformers that has it."""
    module = types.ModuleType(MODULE)
    cls = type(NAME, (LabelSmoother,), {"__call__": LabelSmoother.__call__})
    setattr(module, NAME, cls)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return cls


def train(model, smoother, *, shares, labels=None, num=4, micro=2):
    """Returns the loss of each step, of its micro-batches."""
    losses, optimizer = [], adam(model)
    for step in range(num):
        optimizer.zero_grad()
        parts = []
        for i in range(micro):
            x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(10 * step + i))
            out = model(x, labels=labels)
            loss = smoother()(out, None, num_items_in_batch=8 * micro if shares else None)
            parts.append(float(loss.detach()))
            (loss if shares else loss / micro).backward()
            with torch.no_grad():
                smoother()(out, None)  # as in evaluation
        losses.append(sum(parts) / (1 if shares else micro))
        optimizer.step()
    return losses


def seen(watch):
    return [float(header["loss"]) for header, *_ in watch._recorder.steps]


@pytest.mark.parametrize("shares", [False, True])
def test_the_loss_behind_the_model_is_that_of_the_step(attach, smoother, shares):
    model = Logits()
    watch = attach(model, recipe="observe")
    losses = train(model, smoother, shares=shares)
    assert losses == train(Logits(), smoother, shares=shares)
    assert seen(watch)[:4] == pytest.approx(losses)
    assert not watch.guard.errors


def test_what_the_model_returns_wins(attach, smoother):
    model, own = Logits(), []
    watch = attach(model, recipe="observe")
    model.register_forward_hook(lambda _m, _args, out: own.append(float(out["loss"].detach())))
    train(model, smoother, shares=False, labels=torch.zeros(8), micro=1)
    assert seen(watch) == pytest.approx(own)


def test_detach_puts_it_back(attach, smoother):
    before = smoother.__call__
    watch = attach(Logits())
    assert smoother.__call__ is not before
    watch.detach()
    assert smoother.__call__ is before
