"""Models that grow after attach: what came in is said, once, and is not counted as observed."""

from __future__ import annotations

import copy

import torch
from attach.conftest import train
from torch import nn


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.pow(2).mean()


def test_layers_that_are_added_are_said_once_and_lower_the_observed_share(attach, capsys):
    model = Growing()
    watch = attach(model, recipe="observe")
    train(model, steps=70)
    assert "added after attach" not in capsys.readouterr().err
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    model.blocks.append(nn.Linear(64, 64))
    train(model, steps=140)
    said = capsys.readouterr().err
    assert said.count("2 Linears were added after attach and are not observed") == 1
    assert "blocks.2, blocks.3" in said
    facts = watch._recorder.facts
    assert "blocks.3 (added after attach, not observed)" in facts["replaced"]
    assert facts["gemm_flops_observed"] == 0.5
    assert not watch.guard.errors
    watch.detach()
    assert attach(model, recipe="observe").summary()["num_sites"] == 2 * watch.summary()["num_sites"]


def test_a_layer_that_is_replaced_is_not_said_to_be_added(attach, capsys):
    model = Growing()
    attach(model, recipe="observe")
    train(model, steps=1)
    model.blocks[1] = nn.Linear(64, 64)
    train(model, steps=70)
    said = capsys.readouterr().err
    assert "no longer observed: blocks.1 (replaced after attach" in said
    assert "added after attach" not in said
