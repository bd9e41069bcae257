"""What a GEMM reads of an operand, held against the operand: invariants that no quantiser of the recipe can break.

Shapes:     operand [M, K], and what the GEMM reads of it -> five counts and one tile
Thread:     training, and autograd's; nothing here reads a value back to the host

A kernel that writes codes to the wrong place, leaves a copy unwritten or reads a scale in another format reports healthy
statistics: it counts what it meant to write. So nothing of the quantiser is believed here. Some tiles of the operand are
read again, their scale is computed from their own amax by the recipe's formula, and every element that the GEMM reads
must lie within half a step of the format from the element that it stands for. Rowwise and columnwise copies are each
held against the operand, which is stricter than holding one against the other.

Tiles that the recipe treats apart (all zero, NaN or Inf, or an amax below 2^-100, where scales overflow) are judged by
the statistics; of them only what a zero tile must be, zero, is asked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp8watch.numerics.formats import Fp8Format, number_format
from fp8watch.quantize import nvfp4
from fp8watch.quantize.rowwise import scale_of_rows
from fp8watch.recipe import ROW, OperandRecipe

NUM_TILES = 32
NUM_BLOCKS = 3  # of 128×128: one has the elements of 128 tiles
_ROWS_APART = 16  # of a block, the rows whose codes are looked at
_PIECE = 128  # elements of a row that stand for a tile that is the whole tensor
_LEAST_AMAX, _MOST_AMAX = 2.0**-100, 2.0**120
_ROUNDING = 2.0**-20  # relative: a float32 product and a float32 division
_MANTISSA_BITS = {"E4M3": 3, "E5M2": 2, "E2M1": 1}
_EXPONENT_BITS = 0x7F800000
_SCALED_COPY = 0.02  # of the energy: a copy in the same proportions is off by a scale, whatever else by its codes


class Reads(NamedTuple):
    """What a GEMM reads of one operand in one direction, in the operand's own rows × columns."""

    data: Tensor  # codes of an FP8 dtype, or dequantised values float32: [M, K]
    scale_inv: Tensor | None  # float32 [ceil(M/bm), ceil(K/bk)] of codes; None: the values are dequantised
    tile: tuple[int, int]  # rows × columns of the operand that share a scale


class QuantiserCheck(NamedTuple):
    """What was found. On the operand's device."""

    elements: Tensor  # int64 [2]: NaN of a finite element; elements off the grid
    tiles: Tensor  # int32 [3]: held against the operand; all zero; with a wrong scale
    fault_tile: Tensor  # int32 [2]: (row, column) of the first that is wrong, else −1


def check_quantiser(
    x: Tensor,
    reads: Reads,
    spec: OperandRecipe,
    scale: Tensor | None = None,
    near: Tensor | None = None,
    phase: int = 0,
) -> QuantiserCheck:
    """Hold sampled tiles of what a GEMM reads against the operand.

    Args:
        x: [M, K] float32, bfloat16 or float16, as it was quantised; after a Hadamard transform, if it went through one.
        reads: what the GEMM is handed.
        spec: how the recipe quantises the operand.
        scale: [1, 1] float32 that multiplies before the cast where it has a history; None: the amax gives it.
        near: [2] integers (row, column) of one more tile to look at, such as that of the largest noise; −1: none.
        phase: which tiles; calls with another phase see others. The first and the last are always among them.
    """
    fmt = number_format(spec.format)
    shape = (int(x.shape[0]), int(x.shape[1]))
    whole = spec.tile is None
    at = _sampled(shape, (1, _PIECE) if whole else reads.tile, x.device, None if whole else near, phase)
    rows, columns = _elements(at, shape, (1, _PIECE) if whole else reads.tile)
    x_TE = x[rows, columns].to(torch.float32)
    amax_T = x_TE.abs().amax((1, 2))
    if (
        rows.shape[1] > _ROWS_APART and columns.shape[2] > 1
    ):  # all of a block gives its amax, some of its rows are enough below
        x_TE, rows = x_TE[:, ::_ROWS_APART], rows[:, ::_ROWS_APART]
    x_TE = x_TE.flatten(1)
    code_TE = _gather(reads.data, rows, columns).flatten(1)
    judged = (amax_T >= _LEAST_AMAX) & (amax_T <= _MOST_AMAX)  # False for NaN
    lost = torch.zeros_like(judged)
    if spec.scaling == "nvfp4":
        of = x.detach().abs().amax().to(torch.float32)
        of_block, scale = nvfp4.block_scales(amax_T, of)
        lost = judged & (of_block.float() == 0)  # all of it becomes zero
        judged &= ~lost & (of >= _LEAST_AMAX) & (of <= _MOST_AMAX)
    elif scale is None:
        of = x.detach().abs().amax().to(torch.float32).expand(len(at)) if whole else amax_T
        judged &= (of >= _LEAST_AMAX) & (of <= _MOST_AMAX)
        scale = recipe_scale(of, spec, fmt)
    scale_T = torch.where(judged, scale.reshape(-1), 1.0)
    at = torch.zeros_like(at) if whole else at

    y_TE = (x_TE * scale_T[:, None]).clamp(-fmt.max_finite, fmt.max_finite)
    if reads.scale_inv is None:
        code_TE = code_TE * scale_T[:, None]
    zeroed = judged & (y_TE.abs().amax(1) > fmt.min_subnormal) & (code_TE == 0).all(1)
    nan = code_TE.isnan() & (judged & ~zeroed)[:, None]
    most_TE = _half_step(y_TE, fmt) * (2.0 if spec.stochastic_rounding else 1.0)  # either of the two next to it
    off = ~((y_TE - code_TE).abs() <= most_TE) & ~code_TE.isnan() & (judged & ~zeroed)[:, None]
    if reads.scale_inv is None:
        wrong_scale = off.any(1) & _is_scaled_copy(y_TE, code_TE, fmt)
        off &= ~wrong_scale[:, None]
    else:
        wrong_scale = judged & _wrong_scales(reads, shape, at, scale_T)
    off |= ((amax_T == 0) | lost)[:, None] & (code_TE.abs() > 0)
    bad = zeroed | wrong_scale | (nan | off).any(1)
    first = bad.to(torch.int32).argmax().reshape(1)
    return QuantiserCheck(
        torch.stack((nan.sum(), off.sum())),
        torch.stack((judged.sum(), zeroed.sum(), wrong_scale.sum())).to(torch.int32),
        at.index_select(0, first).reshape(2).to(torch.int32).masked_fill(~bad.any(), -1),
    )


def recipe_scale(amax: Tensor, spec: OperandRecipe, fmt: Fp8Format) -> Tensor:
    """The scale that an amax gives, by the recipe's formula; see `tile_scale` and `e8m0_scale_inv` for the source."""
    if spec.scaling == "mx":
        mantissa, exponent = torch.frexp(amax / torch.full_like(amax, fmt.max_finite))
        up = exponent - (mantissa == 0.5).to(exponent.dtype)  # 2^up is the power of two at or above it
        return torch.ldexp(torch.ones_like(amax), -up.clamp(-126, 127))
    if spec.tile == ROW:
        return scale_of_rows(amax, spec)
    scale = torch.full_like(amax, fmt.max_finite) / amax.clamp_min(spec.eps)
    if spec.power_2_scale:
        scale = scale.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    return scale


def _half_step(y: Tensor, fmt: Fp8Format) -> Tensor:
    """Half the distance of the format's numbers at y, and what float32 rounds."""
    size = y.abs()
    exponent = size.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32).clamp_min(fmt.min_normal)
    return exponent * 2.0 ** -(_MANTISSA_BITS[fmt.name] + 1) + size * _ROUNDING


def _wrong_scales(reads: Reads, shape: tuple[int, int], at: Tensor, scale_T: Tensor) -> Tensor:
    """Of each sampled tile whether scale_inv is not 1/scale; all of them where there is not one a tile. [T] bool"""
    assert reads.scale_inv is not None
    expected = (-(-shape[0] // reads.tile[0]), -(-shape[1] // reads.tile[1]))
    if tuple(reads.scale_inv.shape) != expected:
        return torch.ones(len(at), dtype=torch.bool, device=at.device)
    product = reads.scale_inv[at[:, 0], at[:, 1]].to(torch.float32) * scale_T
    return ~((product - 1).abs() <= _ROUNDING)


def _is_scaled_copy(y: Tensor, code: Tensor, fmt: Fp8Format) -> Tensor:
    """Of each tile whether its codes are those of another scale: in proportion, by a factor that rounding never gives."""
    energy = y.square().sum(1)
    gain = (y * code).sum(1) / energy
    rest = (code - gain[:, None] * y).square().sum(1)
    return ((gain - 1).abs() > 2.0 ** -(_MANTISSA_BITS[fmt.name] + 1)) & (rest <= _SCALED_COPY * gain.square() * energy)


def _gather(data: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Elements as float32; few operations know FP8, so its bytes are gathered."""
    if data.dtype.itemsize > 1:
        return data[rows, columns].to(torch.float32)
    return data.view(torch.uint8)[rows, columns].view(data.dtype).to(torch.float32)


@lru_cache(maxsize=1024)
def _spread(num: int, of: int, device: torch.device) -> Tensor:
    """`num` of the numbers below `of`, evenly spread: [num] int64."""
    return (torch.arange(num, device=device) * of).div(num, rounding_mode="floor")


def _sampled(
    shape: tuple[int, int], tile: tuple[int, int], device: torch.device, near: Tensor | None, phase: int
) -> Tensor:
    """Which tiles: [T, 2] int64 (row, column). No random numbers: the generators belong to training."""
    num_rows, num_columns = -(-shape[0] // tile[0]), -(-shape[1] // tile[1])
    of = num_rows * num_columns
    num = min(of, NUM_BLOCKS if min(tile) > _ROWS_APART else NUM_TILES)
    flat = _ends(of, device)
    if num > 2:
        flat = torch.cat((flat, (_spread(num - 2, of - 2, device) + phase).remainder(of - 2) + 1))
    at = torch.stack((flat.div(num_columns, rounding_mode="floor"), flat.remainder(num_columns)), 1)
    if near is None:
        return at
    one = near.to(torch.int64).clamp_min(0)
    named = torch.stack((one[0].clamp_max(num_rows - 1), one[1].clamp_max(num_columns - 1)))
    return torch.cat((at, named[None]))


@lru_cache(maxsize=1024)
def _ends(of: int, device: torch.device) -> Tensor:
    """The first and the last of `of` numbers, made on the device: a copy from the host would wait for it."""
    return torch.arange(0, of, max(of - 1, 1), device=device)


def _elements(at: Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of each element of each tile, [T, bm, 1] and [T, 1, bk]; past the edge the last one is repeated."""
    rows = at[:, :1] * tile[0] + _spread(tile[0], tile[0], at.device)
    columns = at[:, 1:] * tile[1] + _spread(tile[1], tile[1], at.device)
    return rows.clamp_max(shape[0] - 1)[:, :, None], columns.clamp_max(shape[1] - 1)[:, None, :]
