"""The loss scale of engines that skip steps by themselves: an overflow of it is how float16 is trained, and no failure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8watch.integrations import deepspeed, megatron
from fp8watch_agent.record import StepPresent, StepStatus

SCALES = [65536.0, 65536.0, 32768.0]
"""Of three steps, of which the second overflows."""


class Float16Optimizer:
    """Around a torch optimizer, as those of engines are. It halves its scale within the step that overflows."""

    def __init__(self, model) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01)
        self.param_groups, self.num_steps = self.optimizer.param_groups, 0
        self.cur_scale, self.grad_scaler = SCALES[0], object()

    def get_loss_scale(self):
        return torch.tensor([self.cur_scale])

    def step(self):
        overflows = self.num_steps == 1
        self.num_steps += 1
        if overflows:
            self.cur_scale /= 2
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return not overflows, None, None


class Engine(nn.Module):
    """Of DeepSpeed."""

    def __init__(self, model, *, half=True) -> None:
        super().__init__()
        self.module, self.half = model, half
        self.optimizer, self.global_steps, self.skipped_steps = Float16Optimizer(model), 0, 0

    def fp16_enabled(self):
        return self.half

    def forward(self, x):
        return self.module(x).pow(2).mean()

    def step(self):
        done, *_ = self.optimizer.step()
        self.global_steps += 1
        self.skipped_steps += not done


@pytest.fixture
def kept(attach):
    """What the recorder of a watch was handed; adapters attach by themselves."""
    return lambda watch: watch._recorder


def scales(recorder):
    """Of each step: its loss scale, None where there is none, and whether it was skipped."""
    return [
        (
            float(h["loss_scale"]) if int(h["present"]) & StepPresent.LOSS_SCALE else None,
            int(h["status"]) == StepStatus.SKIPPED,
        )
        for h, *_ in recorder.steps
    ]


@pytest.mark.parametrize("half", [True, False])
def test_the_scale_of_a_deepspeed_engine_in_float16_is_recorded(kept, half):
    engine = Engine(nn.Sequential(nn.Linear(64, 64)), half=half)
    watch = deepspeed.attach_deepspeed(engine, recipe="observe")
    for _ in range(3):
        engine(torch.randn(8, 64)).backward()
        engine.step()
    recorder = kept(watch)
    watch.detach()
    assert scales(recorder) == [(scale if half else None, i == 1) for i, scale in enumerate(SCALES)]
    assert watch.guard.errors == {}


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_the_scale_of_a_megatron_optimizer_in_float16_is_recorded(kept, half, chained):
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = Float16Optimizer(model)
    if not half:
        optimizer.grad_scaler = None
    given = optimizer
    if chained:
        given = SimpleNamespace(chained_optimizers=[optimizer], step=optimizer.step, optimizer=optimizer.optimizer)
    watch = megatron.attach_megatron(model, given, recipe="observe")
    for _ in range(3):
        model(torch.randn(8, 64)).pow(2).mean().backward()
        given.step()
    recorder = kept(watch)
    watch.detach()
    assert scales(recorder) == [(scale if half else None, i == 1) for i, scale in enumerate(SCALES)]
    assert watch.guard.errors == {}
