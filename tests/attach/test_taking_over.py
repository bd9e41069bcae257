"""An optimizer of which it only looks as if it took over from others: they go on, and steps end where the last of them steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch_agent.training_names import OPTIMIZER_BEGINS


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


def forward_backward(m):
    m(torch.randn(16, 64).bfloat16()).float().pow(2).mean().backward()


def ended_by(watch):
    return [float(header["lr"]) for header, *_ in watch._recorder.steps]


@pytest.mark.parametrize("held", ["one of them", "a tied one", "all"])
def test_an_optimizer_that_steps_before_another_that_goes_on_ends_none_of_its_steps(attach, held):
    """Only where it holds all of the other's may it be the next stage, until that steps."""
    m = model()
    if held == "a tied one":
        m[1].weight = m[0].weight
    watch = attach(m, recipe="observe")
    last = torch.optim.SGD(m.parameters(), lr=0.01)
    first = torch.optim.SGD((m if held == "all" else m[0]).parameters(), lr=5e-4)
    for step in range(30):
        forward_backward(m)
        for optimizer in [first, last] if step >= 10 else [last]:
            optimizer.step()
    assert len(watch._recorder.steps) == 30
    told = [OPTIMIZER_BEGINS in logs for _, _, _, logs, _ in watch._recorder.steps]
    assert told == [held == "all" and step == 10 for step in range(30)]
    assert ended_by(watch) == [5e-4 if begins else 0.01 for begins in told]


def test_the_optimizer_of_an_earlier_stage_that_comes_again_ends_each_step(attach):
    """With a backward of its own behind the other's only step: two that take turns, and from then on both are waited for."""
    m = model()
    watch = attach(m, recipe="observe")
    one, other = (torch.optim.SGD(m.parameters(), lr=lr) for lr in (0.01, 5e-4))
    for optimizer in (*[one] * 10, other, *[one] * 10, *[other, one] * 10):
        forward_backward(m)
        optimizer.step()
    assert ended_by(watch) == [*[0.01] * 10, 5e-4, *[0.01] * 20]
