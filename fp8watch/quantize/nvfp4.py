"""NVFP4 scaling: E2M1 numbers under scales of two levels, emulated with torch operations on the operand's device.

Shapes:     x [M, K] -> numbers [M, K], E4M3 scale and scale_inv [Mt, Kt], amax of the tensor     Thread: training

Source: Transformer Engine 2.20, `NVFP4BlockScaling` in common/recipe, `NVFP4QuantizerRef` in
pytorch/custom_recipes/reference_nvfp4.py, whose bits these are, and `core_nvfp4.cuh` of its kernels:

    scale of the tensor   2688 / amax (448 · 6), at most the largest float32; 1 where amax is 0 or Inf
    scale of a block      amax of the block · (scale of the tensor · (1/6)), at most 448, to E4M3
    number                x · 1 / (scale of the block / scale of the tensor), to E2M1, at most 6
    x̂                     number · scale_inv, and scale_inv = scale of the block · (amax / 2688)

A block is 16 elements along the contraction, or 16×16 of a weight. One whose scale rounds to 0 is lost: all of it becomes 0.
Neither E2M1 nor this rule stores what is not finite: with a NaN every scale is NaN, with an Inf the scale_inv of every block
is, and so is every product. Blocks of the columnwise copies of inputs and gradients are of the operand after a Hadamard
transform of 16 rows with fixed signs, which drops out of their product.

Gradients are rounded stochastically. The noise is a hash of where an element lies and of all bits of the operand: it draws
from no generator of torch's, equal operands have equal codes whatever is observed, recomputed or resumed, and another
operand has other noise. Transformer Engine draws from the generator of the device: its codes of gradients are others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp8watch.kernels import reference, reference_stats
from fp8watch.numerics.formats import E2M1
from fp8watch.numerics.operand_checks import check_denormals, check_operand
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats

BLOCK = 16
LARGEST_SCALE = 448.0
LEVELS = LARGEST_SCALE * E2M1.max_finite
SMALLEST_SCALE = 2.0**-9
"""Of E4M3: scale_inv of a lost block is computed with it, since a scale of 0 has no inverse."""

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of Transformer Engine's random Hadamard transform: drawn once, by its authors."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ORDINARY_AMAX = 2.0**127  # above it a number may stand for more than float32 can hold
_GOLDEN = -0x61C8864680B583EB  # odd, 2^64 / golden ratio as int64
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1))  # shifts and factors of a 32-bit hash


class Nvfp4(NamedTuple):
    """A tensor in NVFP4. A `_t` tensor is [Mt, bm, Kt, bk]."""

    x_t: Tensor  # float32: the operand as it was cast, zero beyond the edges
    numbers_t: Tensor  # float32, of E2M1; what a NaN becomes is 0
    scale: Tensor  # torch.float8_e4m3fn [Mt, Kt]
    scale_inv: Tensor  # float32 [Mt, Kt]: of both levels
    amax: Tensor  # float32, 0-d, of the tensor; NaN where one is

    @property
    def lost(self) -> Tensor:
        """Blocks whose scale is 0: bool [Mt, Kt]."""
        return self.scale.float() == 0

    def kept_t(self) -> Tensor:
        """The numbers that are multiplied: those of lost blocks are 0."""
        return self.numbers_t.masked_fill(reference.spread(self.lost), 0.0)


def cast(x: Tensor, tile: tuple[int, int], noise: Tensor | None = None) -> Nvfp4:
    """Quantise a 2-D operand.

    Args:
        x: [M, K] float32, bfloat16 or float16; any strides. Not differentiated.
        tile: (1, 16), (16, 1) for columnwise data in the operand's own rows × columns, or (16, 16).
        noise: float32 [M, K] in [0, 1): rounds up where it reaches the distance to the next number; None: to nearest, ties
            to even.

    Raises:
        TypeError, ValueError: x is not as said above.
        RuntimeError: subnormal numbers are flushed to zero in this thread (CPU).
    """
    check_operand(x)
    check_denormals(x)
    x_t = reference.tiled(x.detach().to(torch.float32), tile)
    of_block = x_t.abs().amax((1, 3))
    amax = of_block.amax()
    scale, multiplier = block_scales(of_block, amax)
    level = scale.float()
    y_t = (x_t * reference.spread(multiplier)).clamp_(-E2M1.max_finite, E2M1.max_finite)
    size_t = y_t.abs()
    if noise is None:
        rounded_t = reference.round_to_grid(size_t, E2M1)
    else:
        step_t = _step(size_t)
        rounded_t = size_t.div(step_t).add_(reference.tiled(noise, tile)).floor_().mul_(step_t)
    numbers_t = torch.copysign(rounded_t, y_t).masked_fill_(~(size_t > 0), 0.0)  # NaN, and both zeros
    whole = (amax / LEVELS).masked_fill(amax == 0, 1.0)
    return Nvfp4(x_t, numbers_t, scale, level.masked_fill(level == 0, SMALLEST_SCALE) * whole, amax)


def block_scales(of_block: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each block, torch.float8_e4m3fn, and what multiplies its elements before the cast, float32.

    Args:
        of_block: amax of the blocks, float32, any shape; NaN where one is.
        amax: of the tensor, float32, 0-d.
    """
    encode = torch.full_like(amax, LEVELS).div_(amax).clamp_(max=_FLOAT32_MAX)
    encode = encode.masked_fill(encode == 0, 1.0)
    sixth = torch.full_like(amax, E2M1.max_finite).reciprocal_()
    scale = (of_block * (encode * sixth)).clamp_(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    decode = scale.float() * torch.ones_like(amax).div_(encode)
    return scale, torch.ones_like(decode).div_(decode).clamp_(max=_FLOAT32_MAX)


def _step(size: Tensor) -> Tensor:
    """Distance of the numbers of E2M1 at 0 … 6: 0.5 below 2, 1 below 4, 2."""
    power = size.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return power.clamp_min_(E2M1.min_normal).mul_(E2M1.min_subnormal)


def rotated(x: Tensor) -> Tensor:
    """The operand after the random Hadamard transform of each 16 rows: [M, K] of the same dtype.

    Products over M of two operands that went through it are those of the operands. Rows that are left over, fewer than
    16, stay as they are; Transformer Engine refuses such operands.
    """
    whole = x.shape[0] // BLOCK * BLOCK
    if not whole:
        return x
    groups = x[:whole].detach().to(torch.float32).reshape(-1, BLOCK, x.shape[1])
    with torch.autocast(x.device.type, enabled=False):
        turned = torch.matmul(_transform(x.device), groups).view(whole, x.shape[1]).to(x.dtype)
    return turned if whole == x.shape[0] else torch.cat((turned, x[whole:].detach()))


@lru_cache(maxsize=16)
def _transform(device: torch.device) -> Tensor:
    """(diag(signs) · H / 4)ᵀ: float32 [16, 16]."""
    with torch.inference_mode(False):
        matrix = torch.ones((1, 1), device=device, dtype=torch.float32)
        while len(matrix) < BLOCK:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return (torch.tensor(SIGNS, device=device, dtype=torch.float32)[:, None] * matrix / 4).t().contiguous()


def noise_of(x: Tensor, seed: int = 0) -> Tensor:
    """The noise that rounds an operand stochastically: float32 [M, K], in [0, 1), a multiple of 2^-24.

    Args:
        x: [M, K].
        seed: other noise for the same operand.
    """
    x = x.detach().contiguous()
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    key = ((bits.sum(dtype=torch.int64) + seed) * _GOLDEN >> 32).to(torch.int32)
    hashed = torch.arange(x.numel(), dtype=torch.int32, device=x.device).add_(key)
    for shift, factor in _MIX:
        hashed.bitwise_xor_(hashed >> shift).mul_(factor)
    return hashed.bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24).view(x.shape)


def measure(cast: Nvfp4, shape: tuple[int, int], job: QuantizeJob, dtype: torch.dtype) -> TileStats:
    """The statistics of one cast.

    Args:
        cast: of the operand, as it entered the cast.
        shape: of the operand, M × K.
        job: tile, and how much to measure.
        dtype: of the operand.
    """
    magnitude_t, kept_t = cast.x_t.abs(), cast.kept_t()
    finite = cast.amax.is_cpu and float(cast.amax) < _ORDINARY_AMAX  # another device would have to be waited for
    amax = (magnitude_t if finite else magnitude_t.nan_to_num(0.0, posinf=float("inf"))).amax((1, 3))
    scale = torch.ones_like(cast.scale_inv).div_(cast.scale_inv)
    operand = reference_stats.Operand(
        reference_stats.Kind.FINITE if finite else reference_stats.Kind.ANY,
        cast.x_t,
        magnitude_t,
        kept_t.abs(),
        kept_t * reference.spread(cast.scale_inv) if job.heavy else None,
        amax,
        scale,
        cast.scale_inv,
        reference.tile_scale(amax, job, dtype)[1],
        reference_stats.saturated(magnitude_t * reference.spread(scale), magnitude_t, E2M1),
    )
    return reference_stats.measure(operand, shape, job)
