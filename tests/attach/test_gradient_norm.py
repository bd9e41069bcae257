"""The gradient norm that a loop clips by is recorded with the step, without being told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from fp8watch.session.gradient_norm import MEASURED_STEPS, MIN_CLIPPED
from fp8watch_agent.record import StepPresent


def norms(watch):
    return [
        float(h["grad_norm"]) if int(h["present"]) & StepPresent.GRAD_NORM else None for h, *_ in watch._recorder.steps
    ]


def step(model, optimizer, clip, *, x=None):
    optimizer.zero_grad()
    model(torch.randn(32, 64) if x is None else x).backward()
    got = clip()
    optimizer.step()
    return got


def test_the_norm_before_clipping_is_recorded_and_nothing_changes(attach, mlp):
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    plain = clip_grad.clip_grad_norm_
    watch = attach(mlp)
    assert clip_grad.clip_grad_norm_ is not plain
    wanted = []
    for make in (list, iter, tuple):
        x = torch.randn(32, 64)
        mlp.zero_grad()
        mlp(x).backward()
        grads = [p.grad.clone() for p in mlp.parameters()]
        wanted.append(float(plain(mlp.parameters(), 1e-3)))
        clipped = [p.grad.clone() for p in mlp.parameters()]
        for p, g in zip(mlp.parameters(), grads, strict=True):
            p.grad.copy_(g)
        got = torch.nn.utils.clip_grad_norm_(make(mlp.parameters()), max_norm=1e-3)
        assert float(got) == wanted[-1]
        assert all(torch.equal(p.grad, c) for p, c in zip(mlp.parameters(), clipped, strict=True))
        optimizer.step()
    assert norms(watch) == pytest.approx(wanted)
    step(mlp, optimizer, lambda: None)
    step(mlp, optimizer, lambda: clip_grad.clip_grad_norm_(mlp.parameters(), 1.0, norm_type=float("inf")))
    assert norms(watch)[3:] == [None, None], "absent where nobody took it, or took another"
    watch.detach()
    assert clip_grad.clip_grad_norm_ is plain
    assert torch.nn.utils.clip_grad_norm_ is plain


def test_parts_that_are_clipped_apart_are_one_norm(attach, mlp):
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    watch = attach(mlp)
    parts = [float(n) for n in step(mlp, optimizer, lambda: [
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0) for part in (mlp.up, mlp.down)
    ])]  # fmt: skip
    assert norms(watch) == pytest.approx([(parts[0] ** 2 + parts[1] ** 2) ** 0.5])


def test_the_norm_of_another_model_is_not_ours_and_that_of_copies_is(attach, mlp):
    other = nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    copies = [p.detach().clone().requires_grad_() for p in mlp.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    watch = attach(mlp, optimizer=optimizer)

    def clip():
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)

    step(mlp, optimizer, clip)
    assert norms(watch) == [None]

    def clip_copies():
        for p, c in zip(mlp.parameters(), copies, strict=True):
            c.grad = p.grad
        return torch.nn.utils.clip_grad_norm_(copies, 1.0)

    got = step(mlp, optimizer, clip_copies)
    assert norms(watch)[1] == pytest.approx(float(got))


def test_what_is_logged_wins_and_an_empty_generator_still_warns(attach, mlp):
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    watch = attach(mlp)

    def clip():
        torch.nn.utils.clip_grad_norm_(mlp.parameters(), 1.0)
        watch.log(grad_norm=7.0)

    step(mlp, optimizer, clip)
    assert norms(watch) == [7.0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    assert any("empty generator" in str(w.message) for w in told)
    assert not watch.guard.errors


def test_where_clipping_stops_the_norm_is_measured_for_some_steps_and_never_before(attach, mlp):
    watch, optimizer = attach(mlp), torch.optim.SGD(mlp.parameters(), lr=0.0)
    other = nn.Linear(4, 4)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    x, wanted = torch.randn(32, 64), []
    for i in range(MIN_CLIPPED + MEASURED_STEPS + 4):
        other(torch.randn(2, 4)).sum().backward()
        others.step()
        others.zero_grad()
        wanted.append(step(mlp, optimizer, lambda i=i: _clip_until(mlp, i), x=x))
    seen = norms(watch)
    assert seen[:MIN_CLIPPED] == pytest.approx(wanted[:MIN_CLIPPED], rel=1e-6)
    first = MIN_CLIPPED + 1  # the step without it is known by its end
    assert seen[first : first + MEASURED_STEPS] == pytest.approx(wanted[first : first + MEASURED_STEPS], rel=1e-5)
    assert seen[MIN_CLIPPED] is None
    assert set(seen[first + MEASURED_STEPS :]) == {None}
    assert not watch.guard.errors


def _clip_until(mlp, i):
    if i < MIN_CLIPPED:
        return float(torch.nn.utils.clip_grad_norm_(mlp.parameters(), 1.0))
    return float(torch.stack([p.grad.norm() for p in mlp.parameters()]).norm())


def test_a_loop_that_never_clipped_is_not_measured(attach, mlp):
    watch, optimizer = attach(mlp), torch.optim.SGD(mlp.parameters(), lr=0.1)
    for _ in range(20):
        step(mlp, optimizer, lambda: None)
    assert set(norms(watch)) == {None}
