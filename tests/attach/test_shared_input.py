"""An input that several Linears read is measured once in observe mode, and each row is as if it was measured for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp8watch.observer import observation_plan


class Heads(nn.Module):
    """q, k and v, given the same tensor or, bit for bit, a copy each; with a write in between where that is asked for."""

    def __init__(self, *, copies: bool, write: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)
        self.copies, self.write = copies, write

    def forward(self, x):
        given = [x.clone() if self.copies else x for _ in range(3)]
        out = self.q(given[0])
        if self.write:
            with torch.no_grad():
                for tensor in {id(t): t for t in given[1:]}.values():
                    tensor.mul_(3)
        return out + self.k(given[1]) + self.v(given[2])


@pytest.fixture
def looks(monkeypatch):
    """How many operands were measured."""
    found = []
    real = observation_plan.measure_operand
    monkeypatch.setattr(observation_plan, "measure_operand", lambda *a, **k: found.append(1) or real(*a, **k))
    return found


def rows_of(attach, model, x, **how):
    watch = attach(model, recipe="observe", probes=[], tile_maps="all", overhead_budget=None, **how)
    for _ in range(2):
        model(x).square().mean().backward()
        watch.step()
    assert not watch.guard.errors
    steps = [watch._recorder.step(i)[1] for i in range(2)]
    assert all(len(rows) == 12 for rows in steps)
    return steps, [m.amax.tobytes() for m in watch._recorder.maps]


def same_bits(one, other) -> bool:
    return np.array(one).tobytes() == np.array(other).tobytes()


@pytest.mark.parametrize("every", [1, 2])
def test_rows_are_those_of_measuring_each(attach, looks, every):
    x = torch.randn(64, 256)
    shared, shared_maps = rows_of(attach, Heads(copies=False), x, every=every)
    num_shared = len(looks)
    apart, apart_maps = rows_of(attach, Heads(copies=True), x, every=every)
    assert len(looks) - num_shared == 2 * 9
    assert num_shared == 2 * 7
    assert shared_maps
    assert shared_maps == apart_maps
    for one, other in zip(shared, apart, strict=True):
        assert one.keys() == other.keys()
        for site, row in one.items():
            assert same_bits(row, other[site]), site


def test_what_was_written_to_in_between_is_measured_anew(attach, looks):
    x, found = torch.randn(64, 256), []
    for copies in (False, True):
        looks.clear()
        model = Heads(copies=copies, write=True)
        watch = attach(model, recipe="observe", probes=[], overhead_budget=None)
        with torch.no_grad():
            model(x.clone())
        assert len(looks) == (5 if not copies else 6)
        found.append(watch._plan.slab.copy_rows())
    assert same_bits(*found)


def test_another_tensor_in_the_same_memory_is_measured_anew(attach, looks):
    model = Heads(copies=False)
    watch = attach(model, recipe="observe", probes=[], overhead_budget=None)
    memory = torch.zeros(64, 256)
    with torch.no_grad():  # no gradients, so that nothing keeps the tensors alive
        for module in (model.q, model.k):
            module(memory.view(64, 256))
    assert len(looks) == 4
    assert not watch.guard.errors


def test_what_was_measured_is_forgotten_with_the_step(attach, looks):
    model, x = Heads(copies=False), torch.randn(64, 256)
    watch = attach(model, recipe="observe", probes=[], overhead_budget=None)
    for _ in range(2):
        model.q(x).sum().backward()
        watch.step()
    assert len(looks) == 2 * 3
