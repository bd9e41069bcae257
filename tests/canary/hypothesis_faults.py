"""What a wrong quantiser may have done, made of what the right one gives: for tests/canary/test_why.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from canary.quantised_operands import BLOCK, COLUMN, REFERENCE, ROW

from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.quantize.self_consistency import Reads
from fp8watch.quantize.why.case import Case
from fp8watch.recipe import OperandRecipe

SPEC = OperandRecipe((1, 128), "E4M3", True, 1e-12)


def gradient(rows=256, columns=384, seed=0):
    """Elements of which each row has another size."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * torch.exp2(3 * torch.randn(rows, 1, generator=g) - 9)


def codes(x, spec=SPEC, tile=ROW):
    """What the right quantiser gives."""
    data, scale_inv, _ = REFERENCE.quantize(x, quantize_jobs(tile, spec.format, spec.power_2_scale, spec.eps)[0])
    return data, scale_inv


def values(data, scale_inv, tile=ROW):
    return REFERENCE.dequantize(data, scale_inv, tile)


def case(x, data, scale_inv, *, as_values, spec=SPEC, tile=ROW, **more):
    """A fault as the GEMM meets it: codes and scales, or values of them."""
    reads = Reads(values(data, scale_inv, tile), None, tile) if as_values else Reads(data, scale_inv, tile)
    return Case(x, reads, spec, torch.zeros(2, dtype=torch.int32), **more)


def with_spec(x, tile=ROW, **changes):
    """Quantised by a recipe that is not the one that was asked for."""
    return codes(x, replace(SPEC, **changes), tile)


def tensorwise(x, power=True):
    scale = 448 / x.abs().amax()
    scale = torch.exp2(torch.log2(scale).floor()) if power else scale
    data, _, _ = REFERENCE.quantize(
        x, quantize_jobs(ROW, "E4M3", True, 0.0)[0], scale.expand(x.shape[0], -(-x.shape[1] // 128)).contiguous()
    )
    return data, (1 / scale).expand(x.shape[0], -(-x.shape[1] // 128)).contiguous()


def of_bytes(data, change):
    return change(data.view(torch.uint8)).contiguous().view(data.dtype)


__all__ = [
    "BLOCK",
    "COLUMN",
    "ROW",
    "SPEC",
    "case",
    "codes",
    "gradient",
    "of_bytes",
    "tensorwise",
    "values",
    "with_spec",
]
