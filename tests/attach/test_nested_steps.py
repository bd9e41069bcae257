"""Optimizers whose step calls the step of another: one update, one step of the run."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict

import pytest
import torch
from attach.stepped import Deep

from fp8watch.session import step_boundary
from fp8watch_agent.training_names import WEIGHTS_CHANGED
from fp8watch_agent.update_names import GRADIENTS_OTHER, STEPPED_AGAIN

NUM = 24


class Lookahead(torch.optim.Optimizer):
    """As that of pytorch_optimizer: torch's hooks around its step, and none of torch's own state."""

    def __init__(self, optimizer):
        self.optimizer, self.counter = optimizer, 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        self.defaults, self.state = dict(optimizer.defaults), defaultdict(dict)
        for p in self.held():
            self.state[p]["slow_params"] = p.detach().clone()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def held(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % 5 == 0:
            for p in self.held():
                self.state[p]["slow_params"].lerp_(p, 0.5)
                p.copy_(self.state[p]["slow_params"])
        return loss


class Ascent(torch.optim.Optimizer):
    """As GSAM: both backwards are inside its step, and what its optimizer gets is a mixture of their gradients."""

    def __init__(self, optimizer, model):
        super().__init__(model.parameters(), {})
        self.optimizer, self.param_groups, self.backward = optimizer, optimizer.param_groups, None

    @torch.no_grad()
    def step(self, closure=None):
        loss, held = self.backward(), [p for p in self.param_groups[0]["params"] if p.grad is not None]
        first = [p.grad.clone() for p in held]
        for p, g in zip(held, first, strict=True):
            p.add_(g, alpha=0.05)
        self.backward()
        for p, g in zip(held, first, strict=True):
            across = g - (g * p.grad).sum() / p.grad.square().sum() * p.grad
            p.grad.add_(across, alpha=-0.4)
            p.sub_(g, alpha=0.05)
        self.optimizer.step()
        return loss


class Chain(torch.optim.Optimizer):
    """Two optimizers, a part of the model each."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        layers = list(model.layers.parameters())
        self.parts = [torch.optim.AdamW([model.table.weight], lr=1e-3), torch.optim.SGD(layers, lr=0.02)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Inherits(torch.optim.AdamW):
    """Calls its parent's step, which torch tells of as well."""

    def step(self, closure=None):
        return super().step(closure)


def inherits(model):
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # from the first on its steps are hooked
    return Inherits(model.parameters(), lr=1e-3)


MAKE = {
    "Lookahead": lambda m: Lookahead(torch.optim.AdamW(m.parameters(), lr=1e-3)),
    "Ascent": lambda m: Ascent(torch.optim.AdamW(m.parameters(), lr=1e-3), m),
    "Chain": Chain,
    "Inherits": inherits,
}


def train(model, optimizer, num=NUM, first=0):
    """Returns the losses."""
    losses = []
    for step in range(first, first + num):

        def backward(step=step):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step)))
            loss.backward()
            return loss

        if isinstance(optimizer, Ascent):
            optimizer.backward = backward
            losses.append(float(optimizer.step().detach()))
        else:
            losses.append(float(backward().detach()))
            optimizer.step()
    return losses


def numbers(watch):
    return [int(header["step"]) for header, *_ in watch._recorder.steps]


def said(watch):
    return {name for *_, logs, _ in watch._recorder.steps for name in logs}


@pytest.mark.parametrize("name", MAKE)
def test_an_update_of_optimizers_one_inside_the_other_is_one_step(attach, name):
    model = Deep()
    watch = attach(model)
    train(model, MAKE[name](model))
    assert not watch.guard.errors
    assert numbers(watch) == list(range(NUM))
    assert [float(header["lr"]) for header, *_ in watch._recorder.steps] == pytest.approx([1e-3] * NUM)
    assert not said(watch) & {STEPPED_AGAIN, WEIGHTS_CHANGED} - ({WEIGHTS_CHANGED} if name == "Ascent" else set())


@pytest.mark.parametrize("name", MAKE)
def test_training_is_the_same_to_the_bit(attach, name):
    plain, watched = Deep(), Deep()
    attach(watched, recipe="observe")
    assert train(plain, MAKE[name](plain)) == train(watched, MAKE[name](watched))


@pytest.mark.parametrize("name", MAKE)
def test_moments_are_looked_at_where_they_are(attach, name):
    model = Deep()
    watch, optimizer = attach(model), MAKE[name](model)
    train(model, optimizer, 8)
    inner = getattr(optimizer, "parts", [getattr(optimizer, "optimizer", optimizer)])[0]
    inner.state[model.table.weight]["exp_avg"].mul_(2.0)
    train(model, optimizer, 4, first=8)
    of = "exp_avg of table.weight"
    assert [step for step, (*_, logs, _) in enumerate(watch._recorder.steps) if of in str(logs)] == [8]


def test_the_optimizer_that_was_named_ends_the_step_and_the_one_inside_is_looked_at(attach):
    model = Deep()
    optimizer = MAKE["Chain"](model)
    watch = attach(model, optimizer=optimizer)
    train(model, optimizer, 8)
    assert numbers(watch) == list(range(8))
    assert watch._scalars.standing.unseen == ""


def test_gradients_that_an_optimizer_mixes_are_counted(attach):
    model = Deep()
    watch = attach(model)
    train(model, MAKE["Ascent"](model), 40)
    assert GRADIENTS_OTHER in said(watch)


def test_one_that_steps_alone_as_well_ends_the_step(attach):
    """As SAM's second_step."""
    model = Deep()
    optimizer = MAKE["Ascent"](model)
    watch = attach(model)
    train(model, optimizer, 4)
    train(model, optimizer.optimizer, 4, first=4)
    train(model, optimizer, 4, first=8)
    assert numbers(watch)[:8] == list(range(8))
    assert len(numbers(watch)) >= 11


def test_a_step_that_raised_is_around_nothing(attach):
    """Its end is never told: the optimizer of the same parameters that takes over is inside nothing."""
    model = Deep()
    watch = attach(model)
    first, second = MAKE["Ascent"](model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, first, 2)
    first.backward = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        first.step()
    train(model, second, 6)
    assert len(numbers(watch)) == 7
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert len(step_boundary._nested._running) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's, where that part of it is imported
def test_zero_redundancy_is_one_step(attach, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Deep()
        watch = attach(model)
        train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))
        assert numbers(watch) == list(range(NUM))
        assert not watch.guard.errors
        assert STEPPED_AGAIN not in said(watch)
    finally:
        torch.distributed.destroy_process_group()
