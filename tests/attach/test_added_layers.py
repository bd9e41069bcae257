"""Models that grow after attach: what came in is said, once, and is not counted as observed."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from attach.conftest import train
from torch import nn

from fp8watch.session.silent_sites import ARRAY


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


def test_adapters_that_are_put_on_between_attach_and_the_first_step_are_said(attach, capsys):
    """As where a trainer is given the adapter's configuration, and makes it."""
    model = Growing()
    watch = attach(model, recipe="observe", filter_fn=lambda _, fqn: fqn != "blocks.1")
    model.blocks.append(nn.Linear(64, 64))
    train(model, steps=2)
    assert "1 Linear was added after attach and is not observed" in capsys.readouterr().err
    assert watch._recorder.facts["gemm_flops_observed"] == pytest.approx(1 / 3, abs=1e-3)


class Blind(Growing):
    """Half of it is never called, and two parameters are added."""

    def __init__(self):
        super().__init__()
        self.idle, self.places = nn.Linear(64, 128), nn.Parameter(torch.randn(32, 64) * 0.1)
        self.positions = nn.Parameter(torch.randn(2, 64) * 0.1)

    def forward(self, x):
        return super().forward(self.blocks[0](x) + self.places + self.positions[0])


def test_a_layer_that_is_added_makes_nothing_seen_that_was_silent(attach):
    model = Blind()
    watch = attach(model, recipe="observe")
    train(model, steps=60)
    facts = watch._recorder.facts
    assert facts["gemm_flops_observed"] == 0.5
    not_counted = facts["not_counted"]
    assert not_counted == f"positions (2-D parameter [2, 64], no GEMM by its name); places ({ARRAY})"
    model.blocks.append(nn.Linear(64, 64))
    train(model, steps=70)
    assert "blocks.2 (added after attach" in facts["replaced"]
    assert facts["gemm_flops_observed"] == 0.4
    assert facts["silent_share"] == "40 % of the GEMM FLOPs were announced as observed and send nothing"
    assert facts["blind"].startswith(facts["silent_share"])
    assert facts["not_counted"] == not_counted
    assert facts["not_taken"] == ""


def test_a_layer_that_is_replaced_is_not_said_to_be_added(attach, capsys):
    model = Growing()
    attach(model, recipe="observe")
    train(model, steps=1)
    model.blocks[1] = nn.Linear(64, 64)
    train(model, steps=70)
    said = capsys.readouterr().err
    assert "no longer observed: blocks.1 (replaced after attach" in said
    assert "added after attach" not in said


def test_a_look_at_many_layers_takes_time_by_their_number(attach):
    model = Growing()
    looks = attach(model, recipe="observe")._replaced
    one = nn.Linear(1, 1)
    looks._added([(f"layer.{i}", one) for i in range(6000)], set())
    begun = time.process_time()
    added = looks._added([(f"layer.{i}", one) for i in range(6001)], {"layer.0"})
    assert added == ["layer.6000"]
    assert time.process_time() - begun < 0.25
