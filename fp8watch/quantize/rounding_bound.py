"""What a GEMM reads of an operand, row by row, held against the most that rounding can take of it.

Shapes:     operand [M, K], and values that a GEMM reads [M, K] -> counts and one tile
Thread:     training, and autograd's; nothing here reads a value back to the host, but on the CPU

A quantiser rounds each element to a number of its format, so what it takes of one is at most half a step, and of one
that is tiny beside its tile half of the smallest number. An element that lost more is off the grid, whatever the data
are: its code lies elsewhere, nobody wrote it, or it stands for another value. Every eighth row is read, and the next time
another eighth: a block of rows that is wrong is met at once, and so are single bytes, where they are more than a few.
`fp8watch.quantize.self_consistency` reads some tiles, and knows what is wrong with them.

Rows that hold something that is not finite, and those below 2^-50, are left to the statistics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8watch.kernels import cpu
from fp8watch.numerics.formats import number_format
from fp8watch.quantize.self_consistency import QuantiserCheck, Reads
from fp8watch.recipe import OperandRecipe

HALF_STEP = {"E4M3": 2.0**-4, "E5M2": 2.0**-3, "E2M1": 2.0**-2}
"""Of a normal number, as a share of it: the most that rounding to nearest takes."""

LEAST_ROWS, MOST_PARTS = 64, 8
"""Rows are read in up to so many parts, of so many rows at least."""

_LEAST = 2.0**-50  # smaller ones are near where scales overflow
_SLACK = 1.0 + 2.0**-10  # what float32 loses in the scale, the product and the difference
_SCALE_ROUNDING = 2.0  # a scale that is a power of two is up to twice as coarse


def part_of_rows(num_rows: int, phase: int) -> slice:
    """The rows to read: each n-th, from another one on where the phase is another."""
    parts = max(1, min(MOST_PARTS, num_rows // LEAST_ROWS))
    return slice(phase % parts, num_rows, parts)


def check_rounding(
    x: Tensor,
    values: Tensor,
    rows: slice,
    spec: OperandRecipe,
    tile: tuple[int, int],
    amax: Tensor,
    scale: Tensor | None = None,
) -> QuantiserCheck | None:
    """Hold rows of what a GEMM reads against the operand.

    Args:
        x: [M, K] float32, bfloat16 or float16, as it was quantised.
        values: float32, what the codes stand for: of all of the operand [M, K], or of `rows` of it alone.
        rows: those to read, see `part_of_rows`.
        spec: how the recipe quantises the operand.
        tile: rows × columns of the operand that share a scale; only for the place.
        amax: 0-d or [1] float32, at least that of the operand; not finite: nothing is judged.
        scale: [1, 1] float32 that multiplies before the cast where it has a history: what it clips is no fault of the
            cast. None: the amax gives it.

    Returns:
        At least so many elements that are NaN, or off the grid, though the operand is finite: one for each row. And the
        tile where the worst of these rows lost most. None: on the CPU, where nothing is wrong.
    """
    fmt = number_format(spec.format)
    exact = x[rows].detach().to(torch.float32)
    if scale is not None:
        limit = fmt.max_finite / scale.reshape(())
        exact = exact.clamp(-limit, limit)
    lost = exact - (values[rows] if values.shape[0] == x.shape[0] else values)
    sizes = exact.abs()
    size = sizes.amax(1)
    if scale is not None:
        coarsest = 1.0 / scale.reshape(())
    else:
        coarsest = amax.reshape(()).clamp_min(spec.eps) * (_SCALE_ROUNDING / fmt.max_finite)
    floor = coarsest * (fmt.min_subnormal / 2 * _SLACK)
    over = lost.abs_().sub_(sizes, alpha=HALF_STEP[fmt.name] * _SLACK)  # of each element, beyond half of its step
    error = over.amax(1)
    judged = size.isfinite() & (size >= _LEAST) & amax.reshape(()).isfinite()
    nan = judged & error.isnan()
    off = judged & ~(error <= floor) & ~nan
    bad = nan | off
    if bad.is_cpu and not bad.any():
        return None
    worst = (error / size).nan_to_num(torch.inf, torch.inf).where(bad, -1.0).argmax().reshape(1)
    column = over.index_select(0, worst).nan_to_num(torch.inf, torch.inf).argmax().reshape(1)
    row = worst * rows.step + rows.start
    at = torch.cat((row // max(tile[0], 1), column // max(tile[1], 1))).to(torch.int32)
    num = exact.shape[0] * -(-exact.shape[1] // max(tile[1], 1)) if tile[0] == 1 else 1  # tiles: of others at least one
    none = torch.zeros((), dtype=torch.int32, device=x.device)
    return QuantiserCheck(
        torch.stack((nan.sum(), off.sum())), torch.stack((none + num, none, none)), at.masked_fill(~bad.any(), -1)
    )


def rows_hold(
    x: Tensor, reads: Reads, rows: slice, spec: OperandRecipe, amax: float, scale: Tensor | None = None
) -> bool:
    """Whether `check_rounding` finds nothing, asked of the C library, on the CPU.

    Args:
        x: [M, K], as it was quantised.
        reads: what the GEMM reads of it, values or codes.
        rows, spec, scale: as of `check_rounding`.
        amax: at least that of the operand; not finite: nothing is judged.

    Returns:
        False: something is wrong, or the library cannot tell.
    """
    if not math.isfinite(amax):
        return True
    fmt = number_format(spec.format)
    limit, coarsest = math.inf, max(amax, spec.eps) * (_SCALE_ROUNDING / fmt.max_finite)
    if scale is not None:
        of_history = float(scale)
        if not 0 < of_history < math.inf:
            return False
        limit, coarsest = fmt.max_finite / of_history, 1.0 / of_history
    floor = coarsest * (fmt.min_subnormal / 2 * _SLACK)
    bound = limit, HALF_STEP[fmt.name] * _SLACK, floor, _LEAST
    return cpu.rows_hold(x.detach(), reads.data.detach(), reads.scale_inv, reads.tile, rows, bound)


def rows_equal(values: Tensor, kept: Reads, rows: slice) -> bool:
    """Whether rows of values are what codes stand for, to the bit, asked of the C library, on the CPU.

    Args:
        values: [M, K] float32.
        kept: codes and scale_inv of the same rows × columns.
        rows: those to read, see `part_of_rows`.

    Returns:
        False: they are not, or the library cannot tell. Rows of values that are not finite are not judged.
    """
    exactly = math.inf, 0.0, 0.0, _LEAST
    return cpu.rows_hold(values.detach(), kept.data.detach(), kept.scale_inv, kept.tile, rows, exactly)


def check_codes(x: Tensor, reads: Reads, spec: OperandRecipe, phase: int) -> QuantiserCheck | None:
    """Hold every eighth row of codes against the operand that they stand for, in a module's turn.

    Args:
        x: [M, K] float32, bfloat16 or float16, as it was quantised.
        reads: codes and scale_inv of the operand's own rows × columns, the scale one of its own amax.
        spec: how the recipe quantises the operand.
        phase: which rows, see `part_of_rows`.

    Returns:
        As `check_rounding`.
    """
    assert reads.scale_inv is not None
    rows, (down, across) = part_of_rows(x.shape[0], phase), reads.tile
    codes = reads.data.view(torch.uint8)[rows].contiguous().view(reads.data.dtype).to(torch.float32)
    row, column = (torch.arange(n, device=x.device) for n in x.shape)
    scales = reads.scale_inv.index_select(0, row[rows] // down).index_select(1, column // across)
    return check_rounding(x, codes.mul_(scales), rows, spec, reads.tile, x.detach().abs().amax().float())
