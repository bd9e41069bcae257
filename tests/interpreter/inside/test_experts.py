"""Experts that compute in FP8 on Triton's kernels: what the reference computes, to the bit."""

from __future__ import annotations

import pytest
import torch
from support.own_models import Experts, K
from torch import nn

import fp8watch


@pytest.mark.long
def test_experts_compute_what_they_compute_on_the_reference(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    ids, x = torch.tensor([0] * 30 + [2] * 3 + [1]), torch.randn(34, K, generator=torch.Generator().manual_seed(1))
    found = []
    for backend in ("reference", "triton"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": Experts(transposed=True, tail=2)})
        watch = fp8watch.attach(model, recipe="blockwise", gemm="emulated", backend=backend)
        y = model["experts"](x.requires_grad_(), ids)
        found.append(
            (y.detach(), *torch.autograd.grad(y.pow(2).sum(), [x, model["experts"].up, model["experts"].down]))
        )
        assert watch.summary()["internal_errors"] == {}
        watch.detach()
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
