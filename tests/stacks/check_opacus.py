"""Differentially private training with Opacus: its gradients of single samples are those of the model without us."""

from __future__ import annotations

import warnings

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp8watch

STEPS = 6


def train(*, attach: str | None, mode: str = "hooks", recipe: str = "observe"):
    """Losses and parameters; attached before or after the model was made private."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(STEPS * 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fp8watch.attach(model, recipe=recipe) if attach == "before" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x), batch_size=16), noise_multiplier=0.0,
            max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
        )  # fmt: skip
    if attach == "after":
        watch = fp8watch.attach(private, recipe=recipe)
    losses = []
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(private(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()))
    if watch is not None:
        assert watch.summary()["internal_errors"] == {}
        assert watch.summary()["num_steps"] == len(losses)
    return losses, [p.detach().clone() for p in private.parameters()]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("attach", ["before", "after"])
def test_observing_changes_nothing(kept, attach, mode) -> None:
    want_losses, want = train(attach=None, mode=mode)
    losses, got = train(attach=attach, mode=mode)
    assert losses == want_losses
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("attach", ["before", "after"])
def test_it_trains_at_attachs_defaults(kept, attach) -> None:
    want, _ = train(attach=None)
    losses, _ = train(attach=attach, recipe="blockwise")
    assert losses == pytest.approx(want, rel=0.05)
    assert losses != want
