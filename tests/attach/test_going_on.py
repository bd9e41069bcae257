"""A run that goes on, or that a trainer numbers: run id, numbers of steps, optimizers that end a step together."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn


def numbers(watch):
    return [int(h["step"]) for h, *_ in watch._recorder.steps]


def test_a_state_is_enough_to_go_on_with_its_run(attach, mlp, train, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of-the-launcher")
    before = attach(mlp)
    train(mlp, steps=3)
    state = before.state_dict()
    before.detach()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of-another-job")
    after = attach(mlp, run_id=state["run_id"])
    after.load_state_dict(state)
    train(mlp, steps=2)
    assert after.identity.run_id == after._recorder.session.run_id == "of-the-launcher"
    assert numbers(after) == [3, 4]


def test_a_run_id_that_no_address_can_carry_is_refused(attach, mlp):
    with pytest.raises(ValueError, match=r"run_id='a b': must be 1 to 128 letters.*watch.state_dict\(\)"):
        attach(mlp, run_id="a b")


def test_a_watch_that_was_switched_off_has_no_run_to_go_on_with(attach, mlp, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DISABLED", "1")
    watch = attach(mlp, run_id="x")
    assert "run_id" not in watch.state_dict()
    watch.number(3)
    watch.load_state_dict(watch.state_dict())


def test_a_step_has_the_number_that_a_trainer_gives_it(attach, mlp, train):
    watch = attach(mlp, start_step=1)
    train(mlp, steps=2)
    watch.number(40)
    train(mlp, steps=2)
    assert numbers(watch) == [1, 2, 40, 41]


def test_optimizers_that_are_named_together_end_the_first_step_together(attach, mlp):
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (mlp.up, mlp.down))
    watch = attach(mlp, optimizer=[first, second])
    for _ in range(3):
        mlp(torch.randn(32, 64)).backward()
        first.step()
        mlp(torch.randn(32, 64)).backward()
        second.step()
    assert numbers(watch) == [0, 1, 2]


def test_a_loss_in_a_dict_is_seen(attach):
    class InADict(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            return {"logits": x, "loss": self.up(x).square().mean()}

    model = InADict()
    watch = attach(model)
    loss = model(torch.randn(8, 32))["loss"]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert watch._recorder.losses() == pytest.approx([float(loss.detach())])


def test_fp8watch_imports_no_trainer():
    names = ("transformers", "lightning", "pytorch_lightning", "accelerate", "deepspeed", "megatron", "torchtitan")
    code = (
        "import sys, fp8watch, fp8watch.session.attach, fp8watch.integrations.trainer_watch, fp8watch.integrations.deepspeed;"
        f"print([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
