"""What tests/quantize/test_measure.py and others share."""

from __future__ import annotations

import torch

KINDS = ("ordinary", "wide", "zeros", "broken", "tiny")


def operand(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(kind))
    x = torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g) * (0 if kind == "ordinary" else 3))
    if kind == "zeros":
        x[x.abs() < 0.5] = 0
    if kind == "broken":
        x.view(-1)[::7], x.view(-1)[::11] = float("nan"), float("inf")
    return (x * 1e-30 if kind == "tiny" else x).to(dtype)


def same(a, b) -> None:
    left, right = a.summary(), b.summary()
    assert repr(left) == repr(right)  # NaN is equal to itself in words
    assert torch.equal(a.counts, b.counts)
    assert torch.equal(a.flags(), b.flags())
    assert torch.equal(a.amax, b.amax)
    assert torch.equal(a.scale_inv.view(torch.int32), b.scale_inv.view(torch.int32))
