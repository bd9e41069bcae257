"""What tests/canary/test_self_consistency.py and others share."""

from __future__ import annotations

import torch

from fp8watch.kernels import resolve
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.quantize.self_consistency import Reads
from fp8watch.recipe import OperandRecipe

ROW, COLUMN, BLOCK = (1, 128), (128, 1), (128, 128)


REFERENCE = resolve("reference", "cpu")


def operand(rows=260, columns=300, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(
        (2 if dtype == torch.float16 else 8) * torch.randn(rows, 1, generator=g)
    )
    x[5], x[7, 3], x[9, 200] = 0, torch.nan, torch.inf
    return x.to(dtype)


def spec_of(tile, fmt="E4M3", power_2=True, eps=0.0):
    return OperandRecipe(BLOCK if tile == BLOCK else ROW, fmt, power_2, eps)


def quantised(x, tile, fmt="E4M3", power_2=True, eps=0.0):
    job = quantize_jobs(tile, fmt, power_2, eps)[0]
    data, scale_inv, _ = REFERENCE.quantize(x, job)
    values, _, _ = REFERENCE.quantize_dequantize(x, job)
    return Reads(data, scale_inv, tile), Reads(values, None, tile)
