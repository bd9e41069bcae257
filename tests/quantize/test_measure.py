"""Statistics alone are those of quantising, bit by bit, and nothing of the operand's size is made for them."""

from __future__ import annotations

import pytest
import torch
from quantize.backends import backends

from fp8watch.kernels import Backend, reference
from fp8watch.kernels import backend as kernel_backend
from fp8watch.numerics.formats import E4M3, E5M2
from fp8watch.numerics.quantize_job import QuantizeJob

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


SHAPES = [(backend, shape) for backend in backends() for shape in ((1, 1), (7, 130), (130, 320))]
SMALL = [
    (b, s) for b, s in SHAPES if s[0] < 8 or b is not reference
]  # the reference has no way of its own, and is slow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "shape"), SMALL, ids=[f"{b.NAME} {s}" for b, s in SMALL])
def test_statistics_alone_are_those_of_quantising(backend: Backend, kind: str, shape: tuple[int, int]) -> None:
    for dtype, fmt in ((torch.float32, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)):
        x = operand(kind, shape, dtype)
        for tile in ((1, 128), (128, 1), (128, 128), shape, (1, 32), (2, 3)):
            given = torch.rand(-(-shape[0] // tile[0]), -(-shape[1] // tile[1])) * 100
            for heavy in (False, True):
                for scale in (None, given):
                    job = QuantizeJob(tile, fmt, True, 0.0, invariant=scale is None, heavy=heavy)
                    want = backend.quantize(x, job, scale)[2]
                    same(kernel_backend.measure(backend, x, job, scale), want)
        for heavy in (False, True):
            both = kernel_backend.quantize_dequantize_both(
                backend, x, QuantizeJob((1, 128), fmt, True, 0.0, heavy=heavy)
            )
            for alone, (_, _, want) in zip(
                kernel_backend.measure_both(backend, x, QuantizeJob((1, 128), fmt, True, 0.0, heavy=heavy)),
                both,
                strict=True,
            ):
                same(alone, want)
