"""Gradients of which nothing small is left, and gradients that are sparse because of their data."""

from __future__ import annotations

import math

import pytest
import torch
from attach.stepped import Deep, adam, steps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch.session import gradient_arrival
from fp8watch.session.gradient_cut_off import UNKNOWN, GradientCutOff, cut_off
from fp8watch_agent.update_names import GRADIENT_APART, GRADIENT_CUT_OFF, GRADIENTS_FLUSHED

ROUND = 9
"""Steps in which each parameter of `Deep` has its turn."""


@pytest.fixture(autouse=True)
def each_step(monkeypatch):
    monkeypatch.setattr(gradient_arrival, "COST_SHARE", 1e9)


def news(watch):
    names = (GRADIENT_CUT_OFF, GRADIENT_APART, GRADIENTS_FLUSHED)
    return [{k: v for k, v in logs.items() if k.startswith(names)} for *_, logs, _ in watch._recorder.steps]


def without_small(g: torch.Tensor, share: float) -> torch.Tensor:
    limit = g.abs().flatten().kthvalue(max(int(share * g.numel()), 1)).values
    return torch.where(g.abs() <= limit, 0.0, g)


def flushed(model, share, when):
    for p in model.parameters():
        if p.dim() == 2:
            p.register_hook(lambda g: without_small(g, share) if when() else g)


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_small_elements_that_backward_flushes_are_said(attach, share):
    model, now = Deep(), [0]
    watch = attach(model)
    flushed(model, share, lambda: now[0] >= 2 * ROUND)
    steps(model, adam(model), 4 * ROUND, before=lambda step: now.__setitem__(0, step + 1))
    said = news(watch)
    assert said[: 2 * ROUND] == [{}] * 2 * ROUND
    told = [(name, value) for logs in said[2 * ROUND :] for name, value in logs.items()]
    assert {name.startswith(GRADIENT_CUT_OFF) for name, _ in told} == {True}
    assert len({name for name, _ in told}) > 3
    assert all(abs(value - share) < 0.1 for _, value in told)
    assert not watch.guard.errors


def test_what_was_never_whole_is_made_so_on_purpose(attach):
    model = Deep()
    watch = attach(model)
    flushed(model, 0.9, lambda: True)
    steps(model, adam(model), 3 * ROUND)
    assert news(watch) == [{}] * 3 * ROUND


def test_what_became_so_on_its_way_is_said_of_its_way_alone(attach):
    model = Deep()
    watch = attach(model)

    @torch.no_grad()
    def cut(step):
        for p in model.parameters():
            if step >= 2 * ROUND and p.dim() == 2:
                p.grad.copy_(without_small(p.grad, 0.9))

    steps(model, adam(model), 4 * ROUND, before=cut)
    assert any(GRADIENTS_FLUSHED in logs for logs in news(watch))
    assert not any(name.startswith(GRADIENT_CUT_OFF) for logs in news(watch) for name in logs)


class Tokens(nn.Module):
    """Few of its tokens come in a step, and half of its units die."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(512, 32), nn.Linear(32, 128), nn.Linear(128, 1)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.embed(ids)))).square().mean()


def test_gradients_that_become_sparse_because_of_their_data_are_not_said(attach):
    torch.manual_seed(0)
    model = Tokens()
    watch, optimizer = attach(model), adam(model)
    for step in range(6 * ROUND):
        if step == 2 * ROUND:
            with torch.no_grad():
                model.up.bias[::2] = -100.0
                model.up.bias[1::4] = -100.0
        ids = torch.randint(0, 512 if step < 2 * ROUND else 40, (8, 64 if step < 2 * ROUND else 4))
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert news(watch) == [{}] * 6 * ROUND


def test_the_number_is_the_share_of_zeros_where_nothing_small_is_left():
    torch.manual_seed(1)
    plain = torch.randn(2048)
    dead = plain * (torch.arange(2048) % 4 == 0)
    few = torch.zeros(2048)
    few[:60] = 1.0
    samples = torch.stack([plain, without_small(plain, 0.45), without_small(plain, 0.7), without_small(plain, 0.95), dead, few, plain * 0,
                           without_small(plain, 0.7) * torch.tensor(math.inf).nan_to_num(posinf=1e30)])  # fmt: skip
    got = cut_off(samples)
    assert got.tolist() == pytest.approx([0, 0, 0.7, 0.95, UNKNOWN, UNKNOWN, UNKNOWN, 0.7], abs=2e-3)
    broken = without_small(plain, 0.7)
    broken[broken != 0] = math.inf
    assert cut_off(broken.view(1, -1)).tolist() == [UNKNOWN]


def test_on_a_device_every_look_has_its_number_and_only_news_stays(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    torch.manual_seed(2)
    look, plain = GradientCutOff(), torch.randn(16, 128)
    dead = plain * (torch.arange(128) % 4 == 0)
    kept = []
    for a, b, c in (
        (plain, dead, plain),
        (without_small(plain, 0.8), without_small(plain, 0.8), without_small(plain, 0.8)),
    ):
        found = look.look([("a", a), ("b", b), ("c", c)])
        assert len(found) == 3
        numbers = {name: float(value) for name, value in found.items()} | {GRADIENT_APART + "c": 0.5}
        look.named(numbers, GRADIENT_APART)
        kept.append({name: round(value, 2) for name, value in numbers.items() if name.startswith(GRADIENT_CUT_OFF)})
    assert kept == [{}, {GRADIENT_CUT_OFF + "a": 0.8}]


def test_it_asks_for_nothing_that_a_gpu_refuses_where_algorithms_must_be_deterministic():
    """As a median with its place, and sums over places that come several times."""

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names() as names:
        cut_off(torch.randn(3, 2048))
    assert names.seen
    assert not {
        name
        for name in names.seen
        if any(word in name for word in ("median", "scatter", "cumsum", "histc", "bincount"))
    }
