"""Faults that have a mode of their own keep it, though every operand is held against what its GEMM reads."""

from __future__ import annotations

import torch
from torch import nn

from fp8watch.demo.faults import _Stale, _Unguarded
from fp8watch.observer.site_rows import INPUT, WEIGHT


def put(watch, operand, kind):
    plan = watch._plan
    row = plan.sites.row(0, operand, False)
    old = plan.sites.quantizers[row]
    plan.sites.replace(row, kind(old.spec, old.columnwise, old.backend))


class Scaled(nn.Module):
    """A Linear whose weight is another one in each call, and whose input may have channels that died."""

    def __init__(self, grows=1.0, dead=False):
        super().__init__()
        self.a, self.grows, self.dead = nn.Linear(160, 128), grows, dead

    def forward(self, x):
        with torch.no_grad():
            self.a.weight.mul_(self.grows)
        if self.dead:
            x = torch.cat((torch.zeros_like(x[:, :128]), x[:, 128:]), 1)
        return self.a(x).square().mean()


def test_a_stale_weight_scale_is_told_as_one(train) -> None:
    line, _ = train(4, model=Scaled(grows=1.7), share=1.0, before=lambda watch: put(watch, WEIGHT, _Stale))
    assert {said[0] for said in line.said()} == {"stale-weight-scale"}


def test_a_zero_tile_without_its_guard_is_told_as_one(train) -> None:
    line, _ = train(2, model=Scaled(dead=True), share=1.0, before=lambda watch: put(watch, INPUT, _Unguarded))
    assert {said[0] for said in line.said()} == {"zero-tile-eps"}


def test_an_inf_is_laundered_and_nothing_else(train) -> None:
    class Overflows(Scaled):
        def forward(self, x):
            x[3, 5] = torch.inf
            return super().forward(x)

    line, _ = train(2, model=Overflows(), share=1.0)
    assert {said[0] for said in line.said()} <= {"inf-laundering", "nan-in-loss"}
    assert line.said()[0][0] == "inf-laundering"
