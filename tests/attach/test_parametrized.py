"""Weights that are computed each time they are read (torch.nn.utils.parametrize): a forward reads them once, as without us, and
nothing else reads them. spectral_norm moves its vectors with each reading, and so would the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations as given
from torch.nn.utils import parametrize

from fp8watch.layers.fp8_linear import SITE_KEY

RECIPES = ["blockwise", "observe"]


class Counts(nn.Module):
    """Computes a weight, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, weight):
        self.num_calls += 1
        return weight * 2.0


class Doubles(nn.Linear):
    """With a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


class Factored(nn.Linear):
    """Without a weight."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        del self.weight
        self.u, self.v = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        return x @ self.u @ self.v


def counted(module: nn.Module) -> Counts:
    counts = Counts()
    parametrize.register_parametrization(module, "weight", counts, unsafe=True)  # it reads nothing to be checked
    counts.num_calls = 0
    return counts


def step(model, optimizer, x):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_computed_weight_is_computed_once_in_a_forward_and_by_nothing_else(attach, recipe):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    counts = counted(model[0])
    watch = attach(model, recipe=recipe)
    assert SITE_KEY in model[0].__dict__
    assert counts.num_calls == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i in range(1, 40):  # some of them rest
        step(model, optimizer, torch.randn(32, 64))
        assert counts.num_calls == i
    watch.pause()
    step(model, optimizer, torch.randn(32, 64))
    model.eval()(torch.randn(8, 64))
    assert counts.num_calls == 41
    assert watch.summary()["internal_errors"] == {}
    watch.detach()
    model(torch.randn(8, 64))
    assert counts.num_calls == 42


@pytest.mark.parametrize("make", [given.spectral_norm, given.weight_norm, given.orthogonal])
def test_what_computes_its_weights_trains_as_without_us_where_it_is_observed(attach, make):
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64))
    batches = torch.randn(6, 32, 64)

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return [step(model, optimizer, x) for x in batches], model.state_dict()

    alone, states = train(copy.deepcopy(model))
    watch = attach(model, recipe="observe", overhead_budget=None)
    losses, states_of_ours = train(model)
    assert losses == alone
    assert states.keys() == states_of_ours.keys()
    assert all(torch.equal(states[name], states_of_ours[name]) for name in states)
    assert {s.module for s in watch._recorder.sites if s.operand == "weight"} == {
        "0",
        "2",
    }  # and not what it is computed from
    assert watch._recorder.facts.get("silent", "") == ""
    assert watch.summary()["internal_errors"] == {}


@pytest.mark.parametrize("later", [False, True])
def test_a_forward_of_its_own_reads_a_computed_weight_alone(attach, later, capsys):
    model = nn.Sequential(nn.Linear(64, 64), Doubles(64, 64))
    counts = None if later else counted(model[1])
    watch = attach(model, recipe="observe")
    if counts is None:
        counts = counted(model[1])
    else:
        assert "own forward" in capsys.readouterr().err
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        step(model, optimizer, torch.randn(32, 64))
    assert counts.num_calls == 3
    assert watch.summary()["internal_errors"] == {}


def test_the_last_product_of_an_attention_may_have_a_computed_weight(attach):
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    counts = counted(attention.out_proj)
    watch = attach(attention, recipe="observe")
    assert counts.num_calls == 0
    x = torch.randn(2, 8, 64)
    attention(x, x, x)[0].sum().backward()
    assert counts.num_calls == 1
    assert watch.summary()["internal_errors"] == {}


def test_a_linear_without_a_weight_is_left_as_it_is_where_it_would_be_observed(attach):
    model = nn.Sequential(nn.Linear(64, 64), Factored())
    watch = attach(model, recipe="observe")
    assert [SITE_KEY in m.__dict__ for m in model] == [True, False]
    model(torch.randn(8, 64)).sum().backward()
    assert watch.summary()["internal_errors"] == {}
