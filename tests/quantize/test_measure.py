"""Statistics alone are those of quantising, bit by bit, and nothing of the operand's size is made for them."""

from __future__ import annotations

import pytest
import torch
from quantize.backends import backends
from quantize.measured_operands import KINDS, operand, same

from fp8watch.kernels import Backend, reference
from fp8watch.kernels import backend as kernel_backend
from fp8watch.numerics.formats import E4M3, E5M2
from fp8watch.numerics.quantize_job import QuantizeJob

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
