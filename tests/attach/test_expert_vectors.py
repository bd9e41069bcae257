"""Each expert has numbers of its own beside the record of its site: its amax, what is not finite, underflow and tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.own_models import E, K, Moe

from fp8watch.observer import expert_vectors

IDS = torch.tensor([0] * 131 + [2] * 7 + [1] * 60)  # the last expert has none


def trained(attach, steps=1, **how):
    torch.manual_seed(0)
    model = Moe(**how)
    watch = attach(model, recipe="observe", overhead_budget=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        model(torch.randn(len(IDS), K), IDS).backward()
        optimizer.step()
    names = {s.id: (s.module, s.operand, s.direction) for s in watch._recorder.sites}
    found = [{names[site]: vector for site, vector in step.items()} for step in watch._recorder.experts]
    assert watch.summary()["internal_errors"] == {}
    return model, watch, found


@pytest.mark.parametrize("way", ["grouped", "loop", "gathered"])
def test_each_expert_says_its_amax_and_its_tokens(attach, way):
    model, watch, [found] = trained(attach, way=way)
    assert {key[1:] for key in found} == {(o, "rowwise") for o in ("input", "weight", "grad_output")}
    for name, parameter in (("experts.up", model.experts.up), ("experts.down", model.experts.down)):
        amax = parameter.detach().abs().amax((1, 2)).numpy()
        seen = amax > 0 if way == "grouped" else np.array([True, True, True, way != "loop"])
        assert np.array_equal(found[name, "weight", "rowwise"]["amax"][seen], amax[seen])
        assert found[name, "weight", "rowwise"]["num_tokens"].tolist() == [0] * E
        for operand in ("input", "grad_output"):
            vector = found[name, operand, "rowwise"]
            assert vector["num_tokens"].tolist() == [131, 60, 7, 0]
            assert (vector["amax"] > 0).tolist() == [True, True, True, False]
            row = watch._recorder.step(0)[1][name, operand, "rowwise"]
            assert vector["amax"].max() == row["amax_max"]
            assert vector["num_underflow"].sum() == row["num_underflow"]


def test_what_is_not_finite_is_counted_at_its_expert_and_rows_of_nobody_nowhere(attach):
    torch.manual_seed(0)
    model = Moe(tail=5)
    with torch.no_grad():
        model.experts.up[1, 5, 7] = float("inf")
    watch = attach(model, recipe="observe", overhead_budget=None)
    model(torch.randn(len(IDS), K), IDS).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    names = {s.id: (s.module, s.operand) for s in watch._recorder.sites}
    found = {names[site]: vector for site, vector in watch._recorder.experts[0].items()}
    assert found["experts.up", "weight"]["num_nonfinite"].tolist() == [0, 1, 0, 0]
    assert np.isinf(found["experts.up", "weight"]["amax"]).tolist() == [False, True, False, False]
    assert found["experts.up", "input"]["num_nonfinite"].tolist() == [0] * E
    broken = found["experts.down", "input"]["num_nonfinite"]
    assert [n > 0 for n in broken] == [False, True, False, False]


def test_experts_have_turns_where_there_are_many(attach, monkeypatch):
    monkeypatch.setattr(expert_vectors, "MAX_ENTRIES", E)
    _, _, found = trained(attach, steps=7)
    assert {len(step) for step in found} == {1}
    assert len({key for step in found for key in step}) == 6


def test_vectors_cost_nothing_of_the_bits(attach, train):
    def weights(observed):
        torch.manual_seed(0)
        model = Moe()
        if observed:
            attach(model, recipe="observe")
        train(model)
        return list(model.parameters())

    assert all(
        torch.equal(a, b)
        for a, b in pairwise([*map(torch.cat, ([p.flatten() for p in weights(o)] for o in (True, False)))])
    )
