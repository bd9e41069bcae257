"""What broke first: an operand, what a GEMM made of finite operands, or the gradient of a parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.kernels import emulated_gemm
from fp8watch.observer import nonfinite_checks
from fp8watch_agent.record import Measured


def outputs(watch, step):
    """Sites of a step whose GEMM's output was not finite, with the count."""
    _, rows = watch._recorder.step(step)
    found = {site: int(row["num_nonfinite_outputs"]) for site, row in rows.items() if row["num_nonfinite_outputs"]}
    assert all(int(rows[site]["measured"]) & Measured.OUTPUTS for site in found)
    return found


@pytest.mark.parametrize(
    ("which", "site"),
    [
        ("fprop", ("down", "input", "rowwise")),
        ("dgrad", ("down", "grad_output", "rowwise")),
        ("wgrad", ("down", "grad_output", "columnwise")),
    ],
)
def test_the_gemm_that_makes_a_nan_of_finite_operands_is_named(attach, mlp, monkeypatch, which, site):
    watch = attach(mlp)
    right = getattr(emulated_gemm, which)
    shapes = {"fprop": (32, 64), "dgrad": (32, 128), "wgrad": (64, 128)}

    def broken(*args):
        out = right(*args)
        if tuple(out.shape) == shapes[which]:
            out[3, 5] = out[4, 6] = math.nan
        return out

    monkeypatch.setattr(emulated_gemm, which, broken)
    mlp(torch.randn(32, 64)).backward()
    watch.step()
    found = outputs(watch, 0)
    assert found.pop(site) == 2
    _, rows = watch._recorder.step(0)
    reads = {"fprop": ["input", "weight"], "dgrad": ["grad_output"], "wgrad": ["grad_output", "input"]}[which]
    assert all(rows["down", operand, "rowwise"]["num_nan"] == 0 for operand in reads)
    origin = int(rows[site]["order"])
    assert all(int(rows[other]["order"]) > origin for other in found)  # what came behind is its consequence


def test_healthy_outputs_leave_nothing(attach, mlp, train):
    watch = attach(mlp)
    train(mlp, steps=2)
    assert outputs(watch, 1) == {}
    assert not any(int(r["measured"]) & Measured.OUTPUTS for r in watch._recorder.step(1)[1].values())


def test_observed_linears_show_what_they_return(attach, mlp, monkeypatch):
    watch = attach(mlp, recipe="observe")
    mlp.up.bias.data[3] = math.inf  # no operand holds it
    mlp(torch.randn(32, 64)).backward()
    watch.step()
    found = outputs(watch, 0)
    assert found["up", "input", "rowwise"] == 32


def test_finite_operands_may_overflow_float16_but_make_no_nan():
    y = torch.tensor([1.0, math.inf, -2.0], dtype=torch.float16)
    assert nonfinite_checks.nonfinite_outputs(y) is None
    y[0] = math.nan
    assert int(nonfinite_checks.nonfinite_outputs(y)) == 1
    for dtype in (torch.float32, torch.bfloat16):
        assert int(nonfinite_checks.nonfinite_outputs(torch.tensor([1.0, -math.inf, math.nan], dtype=dtype))) == 2
    assert nonfinite_checks.nonfinite_outputs(torch.empty(0, 4)) is None
    half = torch.tensor([1.0, -math.inf, math.nan], dtype=torch.float16)
    assert int(nonfinite_checks.nonfinite_outputs(half)) == 1, (
        "what finite operands overflow to is no fault of the GEMM"
    )
    assert int(nonfinite_checks.nonfinite_outputs(half, overflow=True)) == 2, "what a head is given was there before"


def test_a_gradient_that_is_not_finite_is_named(attach, mlp):
    watch = attach(mlp)
    for bad in (False, True):
        mlp.zero_grad()
        mlp(torch.randn(32, 64)).backward()
        if bad:  # in a layer that no site watches
            mlp.lm_head.weight.grad[2, 3] = -math.inf
        watch.step()
    assert "num_nonfinite_gradients" not in watch._recorder.steps[0][3]
    logs = watch._recorder.steps[1][3]
    assert logs["num_nonfinite_gradients"] == 1
    assert logs["nonfinite_gradient/lm_head.weight"] == 1


def test_extremes_of_float32_are_no_fault():
    ends = [torch.tensor([-3e38, 3e38]), torch.tensor([1.0, math.inf]), torch.tensor([math.nan])]
    assert nonfinite_checks.gradient_faults(ends).tolist() == [0, 1, 1]


def test_sparse_and_missing_gradients_are_no_error(attach):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32, sparse=True)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.up = nn.Linear(32, 32)

        def forward(self, tokens):
            return self.up(self.embed(tokens)).square().mean()

    model = Model()
    watch = attach(model)
    model(torch.arange(16)).backward()
    model.embed.weight.grad._values()[0, 0] = math.nan
    watch.step()
    assert not watch.guard.errors
    assert watch._recorder.steps[0][3]["nonfinite_gradient/embed.weight"] == 1


class Checkpointed(nn.Module):
    def __init__(self, reentrant, second=None):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.reentrant, self.second = reentrant, second
        self.calls = 0

    def block(self, x):
        self.calls += 1
        if self.second is not None and self.calls % 2 == 0:  # recomputed in another precision
            with torch.autocast("cpu", dtype=self.second):
                return self.down(torch.relu(self.up(x))).float()
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant, determinism_check="none").pow(2).mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_counted_once_and_is_the_same(attach, reentrant, train):
    model = Checkpointed(reentrant)
    watch = attach(model)
    x = torch.randn(32, 64, requires_grad=True)
    model(x).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert {int(r["num_calls"]) for r in rows.values()} == {1}
    assert "recompute_fingerprint" not in watch._recorder.facts


def test_a_recomputation_in_another_precision_is_told(attach, capsys):
    model = Checkpointed(False, torch.bfloat16)
    watch = attach(model)
    for _ in range(2):
        x = torch.randn(32, 64, requires_grad=True)
        model(x).backward()
        watch.step()
    facts = watch._recorder.facts
    assert facts["recompute_fingerprint"] != watch._recorder.session.fingerprint
    assert "up.input: first float32 [*, 64] fp8, then bfloat16 [*, 64] fp8" in facts["recomputed"]
    assert capsys.readouterr().err.count("activation checkpointing recomputes up.input") == 1
