"""The loss impact that turns measure: what a full diagnosis says of the same rows, and nothing where nobody looked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.diagnose import loss_impact
from fp8watch_agent.record import Measured


class OneLinear(nn.Module):
    """A loss that is linear in the output of its only Linear: its gradient does not hang on FP8."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(160, 96)
        self.register_buffer("weights", torch.randn(96))
        self.inputs = []

    def forward(self, x):
        self.inputs.append(x.detach().clone())
        return (self.proj(x) * self.weights).sum(-1).mean()


def impacts(line):
    """[(module, energy, rows)] in the order of steps."""
    return [
        (line.sites[i].module, float(row["impact_energy"]), int(row["num_impact_rows"]))
        for rows in line.rows for i, row in rows.items() if row["measured"] & Measured.IMPACT
    ]  # fmt: skip


def test_a_turn_says_what_a_diagnosis_says_of_the_same_rows(train):
    model = OneLinear()
    fresh = copy.deepcopy(model)
    line, watch = train(2, model=model, tokens=48, share=0)
    ((module, energy, rows),) = impacts(line)  # the first turn alone: later ones have no share of the time
    x = model.inputs[0]
    watch.detach()
    (layer,) = loss_impact(fresh, x, recipe="blockwise").layers
    assert (module, rows) == ("proj", 48)
    assert layer.spread > 0
    assert energy**0.5 == pytest.approx(layer.spread, rel=1e-4)


def test_sampled_rows_stand_for_all(train):
    line, _ = train(1, model=OneLinear(), tokens=640)
    ((_, energy, rows),) = impacts(line)
    assert rows == 256
    few, _ = train(1, model=OneLinear(), tokens=256)
    ((_, of_few, _),) = impacts(few)
    assert (energy * 6.25 / of_few) == pytest.approx(1, rel=0.3)  # each row has 256 / 640 of the loss


def test_every_module_has_its_figure_and_the_loss_scale_is_taken_off(train):
    plain, _ = train(16)
    assert [m for m, _, _ in impacts(plain)] == ["a", "b", "c"]
    torch.manual_seed(0)
    model = OneLinear()
    watch = fp8watch.attach(model)
    line, optimizer, scaler = watch._recorder, torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu")
    x = torch.randn(48, 160)
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    watch.detach()
    ((_, energy, _),) = impacts(line)
    (layer,) = loss_impact(model, x, recipe="blockwise").layers
    assert energy**0.5 == pytest.approx(layer.spread, rel=1e-4)


def test_nothing_is_said_where_nobody_looked(train):
    observed, _ = train(2, recipe="observe")
    assert not impacts(observed)

    class NoGradient(OneLinear):
        def forward(self, x):
            with torch.no_grad():
                self.proj(x)
            return (x @ self.proj.weight.t()).mean()

    silent, _ = train(2, model=NoGradient())
    assert not impacts(silent)


def test_rows_that_are_not_finite_are_no_impact(train):
    class Broken(OneLinear):
        def forward(self, x):
            return super().forward(x * torch.inf)

    line, _ = train(1, model=Broken())
    assert not impacts(line)
