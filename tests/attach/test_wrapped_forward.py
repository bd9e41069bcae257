"""Modules on which a trainer put a forward that calls their class's, as torchtitan does with each one that it parallelizes."""

from __future__ import annotations

import pytest
import torch
from attach.conftest import Mlp
from torch import nn

from fp8watch.layers.fp8_linear import WatchedLinear


class Experts(nn.Module):
    """Two, one after the other."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x):
        return torch.stack([part @ w.t() for part, w in zip(x.chunk(2), self.w1, strict=True)]).flatten(0, 1)


class Moe(Mlp):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return super().forward(self.experts(x))


def put_on(module, *, around=0):
    """A forward on the module itself, which calls the bound method that it took, `around` functions deep."""
    inner = module.forward

    def again(fn):
        def call(*args, **kwargs):
            return fn(*args, **kwargs)

        return call

    for _ in range(around):
        inner = again(inner)

    def forward(x):
        x = x * 1.0
        return inner(x)

    module.forward = forward


def wrapped(around=0):
    torch.manual_seed(0)
    model = Moe()
    for module in (model.up, model.down, model.experts):
        put_on(module, around=around)
    return model


def losses_of(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), []
    for _ in range(steps):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("around", [0, 2])
def test_what_the_forward_on_a_module_calls_is_observed_and_nothing_changes(attach, around):
    plain = wrapped(around)
    wanted = losses_of(plain)
    model = wrapped(around)
    own = {name: m.__dict__["forward"] for name, m in model.named_modules() if "forward" in m.__dict__}
    watch = attach(model, recipe="observe")
    assert losses_of(model) == wanted
    kept = watch._recorder
    _, rows = kept.step(-1)
    assert {name for name, operand, _ in rows if operand == "input"} == {"up", "down", "experts.w1", "lm_head"}
    assert {name for name, operand, _ in rows if operand == "grad_output"} == {"up", "down", "experts.w1"}
    watch.detach()
    assert own == {name: m.__dict__["forward"] for name, m in model.named_modules() if "forward" in m.__dict__}
    assert type(model.up) is nn.Linear
    assert losses_of(model) == losses_of(plain)
    assert len(kept.steps) == 3
    assert watch.guard.errors == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_it_is_put_on_the_fp8_path_and_compiled(attach):
    model = wrapped()
    plain = losses_of(wrapped())
    watch = attach(model, recipe="blockwise")
    assert isinstance(model.up, WatchedLinear)
    assert losses_of(model) != plain
    model = wrapped()
    other = attach(model, recipe="observe")
    compiled = torch.compile(model.up, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(32, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    _, rows = other._recorder.step(-1)
    assert {name for name, operand, _ in rows if operand == "grad_output"} == {"up"}
    assert watch.guard.errors == other.guard.errors == {}


def test_a_forward_that_stands_in_for_the_class_is_left_alone_with_the_reason(attach, capsys):
    model = wrapped()
    model.up.forward = lambda x: torch.nn.functional.linear(x, model.up.weight, model.up.bias)
    watch = attach(model, recipe="observe")
    assert capsys.readouterr().err.count("up (") == 1
    losses_of(model)
    assert {s.module for s in watch._recorder.sites if s.operand == "weight"} == {"down", "experts.w1"}
