"""NVFP4: E2M1 elements, an E4M3 scale for 16 of them, one FP32 scale for the tensor. Emulated, for what-if analysis only.

Shapes:     x [M, K] -> what the codes stand for, float32 [M, K]
Thread:     any

Source: `nvfp4_quantize` of `torchao.prototype.mx_formats`, version 0.18, whose bits these are for 1×16 blocks with the tensor's
own scale; NVIDIA, "Pretraining large language models with NVFP4" (arXiv 2509.25149) for 16×16 blocks of weights, stochastic
rounding of gradients and the random Hadamard transform of what wgrad reads:

    scale of the tensor     amax / (448 · 6)
    scale of a block        amax of the block / 6 / scale of the tensor, to E4M3, at least 2^-6
    element                 x · (1 / scale of the tensor / scale of the block), to E2M1, at most 6

A transform R along the contraction is orthonormal and is applied to both operands of a GEMM, whose result does not change; the
values given back are those of Q(x·R)·Rᵀ, what the GEMM in effect multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8watch.diagnose.number_grid import E2M1

BLOCK = 16
_FP8_MAX, _FP8_MIN_NORMAL = 448.0, 2.0**-6


class Nvfp4(NamedTuple):
    """Result of a quantisation."""

    values: Tensor  # float32 [M, K]
    num_saturated: Tensor  # 0-d int64


def quantize_nvfp4(
    x: Tensor,
    *,
    columnwise: bool = False,
    square: bool = False,
    generator: torch.Generator | None = None,
    signs: Tensor | None = None,
) -> Nvfp4:
    """Quantise a matrix.

    Args:
        x: [M, K] float32, bfloat16 or float16.
        columnwise: blocks and transform run along M.
        square: blocks of 16×16, as of weights, in place of 1×16.
        generator: rounds stochastically with its numbers; None: to the nearest.
        signs: float32 [16] of ±1, for the random Hadamard transform; None: no transform.
    """
    rows = x.detach().float()
    rows = rows.t() if columnwise else rows
    m, k = rows.shape
    padded = F.pad(rows, (0, -k % BLOCK, 0, -m % BLOCK if square else 0))
    transform = None if signs is None else hadamard(signs.to(padded))
    if transform is not None:
        padded = (padded.reshape(len(padded), -1, BLOCK) @ transform).flatten(1)
    blocks = padded.reshape(len(padded), -1, BLOCK)  # [M, Kb, 16]
    amax = blocks.abs().amax(2)
    whole = amax.max() / (_FP8_MAX * E2M1.max_finite)
    if square:
        amax = amax.reshape(-1, BLOCK, amax.shape[1]).amax(1).repeat_interleave(BLOCK, 0)
    whole = torch.where(whole > 0, whole, torch.ones_like(whole))
    scale = (amax / E2M1.max_finite / whole).clamp(_FP8_MIN_NORMAL, _FP8_MAX).to(torch.float8_e4m3fn).float()
    scaled = blocks * ((1.0 / whole) / scale)[..., None]
    uniform = None if generator is None else torch.rand(scaled.shape, generator=generator, device=scaled.device)
    num_saturated = (scaled.abs() >= E2M1.saturation_midpoint).sum()
    values = E2M1.round(scaled, uniform) * (whole * scale)[..., None]
    if transform is not None:
        values = values @ transform.t()
    values = values.flatten(1)[:m, :k]
    return Nvfp4((values.t() if columnwise else values).contiguous(), num_saturated)


def hadamard(signs: Tensor) -> Tensor:
    """The transform diag(signs)·H/4: orthonormal [16, 16]."""
    matrix = signs.new_ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return signs[:, None] * matrix / 4


def random_signs(seed: int, device: torch.device) -> Tensor:
    """±1 [16], the same for equal seeds."""
    drawn = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(seed))
    return (drawn * 2 - 1).float().to(device)
