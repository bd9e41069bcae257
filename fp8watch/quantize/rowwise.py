"""Rowwise scaling: one scale for each row of an operand, or for each column of one that is read along its rows.

Shapes:     x [M, K] -> scale float32 [M, 1], or columnwise [1, K]     Thread: training

Source: `tensor_to_amax` and `amax_to_scale` of `torchao.float8.float8_utils`, version 0.18, whose bits these are:

    amax of the row       scale
    anything finite       FP8_MAX / max(amax, eps), divided in float64, rounded to float32
    Inf                   0: what is finite becomes 0, the Inf NaN
    NaN inside            NaN, and so is the whole row

Powers of two are taken by way of a float32 logarithm: a scale within 1e-6 below a power of two is rounded up to it. No amax of
bfloat16 or float16 comes so near.
"""

from __future__ import annotations

import torch

from fp8watch.numerics.formats import fp8_format
from fp8watch.recipe import OperandRecipe


def rowwise_scale(x: torch.Tensor, columnwise: bool, spec: OperandRecipe) -> torch.Tensor:
    """Return what multiplies before the cast: float32 [M, 1], or columnwise [1, K].

    Args:
        x: [M, K] float32, bfloat16 or float16.
        columnwise: rows run along M.
        spec: format, power_2_scale and eps.
    """
    return scale_of_rows(x.detach().abs().amax(0 if columnwise else 1, keepdim=True), spec)


def scale_of_rows(amax: torch.Tensor, spec: OperandRecipe) -> torch.Tensor:
    """Return the scales that the amax of rows give: float32 of the same shape."""
    largest = fp8_format(spec.format).max_finite
    scale = (largest / amax.to(torch.float64).clamp(min=spec.eps)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if spec.power_2_scale else scale
