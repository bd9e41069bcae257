"""Optimizers whose step is given a closure: the backward is inside, and what they step with is known behind it."""

from __future__ import annotations

import functools

import pytest
import torch
from attach.stepped import Deep

from fp8watch_agent.update_names import GRADIENT_APART, STEPPED_AGAIN


class Sharp(torch.optim.Optimizer):
    """As SAM: it moves weights along gradients that are there, asks for those at that place, and goes from where it was."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure):
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p, was in zip(held, before, strict=True):
            kept = self.state[p].setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.copy_(was).add_(kept, alpha=-1e-2)


MAKE = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3),
    "Sharp": lambda m: Sharp(m.parameters()),
}


def train(model, optimizer, num=24, *, by_name=False, spoil=None):
    """Returns the losses."""
    losses = []
    for step in range(num):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step)))
            loss.backward()
            if spoil is not None:
                spoil(step)
            return loss

        if isinstance(optimizer, Sharp):
            closure()
            optimizer.step(closure)
        else:
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(functools.partial(closure))
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_a_step_with_a_closure_is_a_step_like_others(attach, name, by_name):
    model = Deep()
    watch = attach(model)
    train(model, MAKE[name](model), by_name=by_name)
    assert not watch.guard.errors
    logs = [log for *_, log, _ in watch._recorder.steps]
    assert len(logs) == 24
    assert not any(key.startswith((STEPPED_AGAIN, GRADIENT_APART, "optimizer/weights")) for log in logs for key in log)
    if name != "Sharp":
        assert watch._scalars.standing.unseen == ""


def test_a_gradient_that_is_changed_behind_the_closure_s_backward_is_told(attach):
    model = Deep()
    watch = attach(model)

    @torch.no_grad()
    def spoil(step):
        if step > 40:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.view(-1)[::2] *= 3

    train(model, MAKE["AdamW"](model), 70, spoil=spoil)
    told = [
        step
        for step, (*_, log, _) in enumerate(watch._recorder.steps)
        if any(k.startswith(GRADIENT_APART) for k in log)
    ]
    assert told
    assert told[0] > 40


@pytest.mark.parametrize("name", MAKE)
def test_training_is_the_same_to_the_bit(attach, name):
    plain, watched = Deep(), Deep()
    attach(watched, recipe="observe")
    assert train(plain, MAKE[name](plain)) == train(watched, MAKE[name](watched))
