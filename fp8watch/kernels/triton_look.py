"""One look at what a module or a GEMM put out: read once, and merged into its row, in two launches.

Shapes:     y [M, N] -> workspace [programs, WORDS] int32 -> one row of ROW, in place     Thread: device

What a look says is what fp8watch.observer.probes.probe_numbers says, and a row that took it is that of `accumulate_probe`. Each
program has a line of its own and the lines are read in a fixed order, without atomic operations: the same output gives the
same row. Nothing is read back to the host. In operators of torch the same look takes a hundred launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8watch.kernels.triton_cast import INF_BITS, bits_of, float_of
from fp8watch.kernels.triton_fold import (
    ELEMENTS_I8,
    ENERGIES_F8,
    FIRST_I4,
    HIST_I4,
    ITEMSIZE,
    MAXIMA_F4,
    MEASURED_I4,
    MINIMA_F4,
    ORDER_I4,
    TILES_I4,
    WORST_I4,
    lacking,
    on_device_of,
    place,
)
from fp8watch_agent.record import Measured

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WORDS = tl.constexpr(
    8
)  # of a line: energy (float64), first non-finite element (int64), NaN, Inf, bits of the amax, one that is 0
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
OUTPUTS_I8 = place("num_nonfinite_outputs", 8)
OUTPUTS = tl.constexpr(int(Measured.OUTPUTS))

BLOCK, INTERPRETED_BLOCK = 1024, 1 << 16
"""Elements that a program reads at once; the interpreter is slow by the operation and hardly by the element."""
TIMES = 16
"""How often a program reads so many."""
CHUNK = 256
"""Lines that are merged at once, by one warp: its threads read what they write."""


@triton.jit
def look_kernel(
    y, lines, num_elements, N, stride_m, stride_n, BLOCK: tl.constexpr, TIMES: tl.constexpr, DENSE: tl.constexpr, ENERGY: tl.constexpr,
):  # fmt: skip
    """Program i looks at the elements from i · BLOCK · TIMES on, counted row by row."""
    num_nan = tl.zeros([BLOCK], tl.int32)
    num_inf = tl.zeros([BLOCK], tl.int32)
    amax = tl.zeros([BLOCK], tl.int32)
    first = tl.full([BLOCK], NEVER, tl.int64)
    energy = tl.zeros([BLOCK], tl.float64)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    for i in range(TIMES):
        index = start + i * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_elements
        where = index if DENSE else index // N * stride_m + index % N * stride_n
        value = tl.load(y + where, mask=inside, other=0.0)
        if y.dtype.element_ty == tl.bfloat16:  # by its bits: the interpreter's conversion loses subnormal numbers
            bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        else:
            bits = bits_of(value.to(tl.float32))
        magnitude = bits & 0x7FFFFFFF
        nan = magnitude > INF_BITS
        num_nan += nan.to(tl.int32)
        num_inf += (magnitude == INF_BITS).to(tl.int32)
        amax = tl.maximum(amax, tl.where(nan, 0, magnitude))
        first = tl.minimum(first, tl.where(magnitude >= INF_BITS, index, NEVER))
        if ENERGY:
            exact = float_of(tl.where(magnitude >= INF_BITS, 0, magnitude)).to(tl.float64)
            energy += exact * exact
    line = lines + tl.program_id(0).to(tl.int64) * WORDS
    wide = line.to(tl.pointer_type(tl.int64))
    if ENERGY:
        tl.store(line.to(tl.pointer_type(tl.float64)), tl.sum(energy, 0))
    tl.store(wide + 1, tl.min(first, 0))
    tl.store(line + 4, tl.sum(num_nan, 0))
    tl.store(line + 5, tl.sum(num_inf, 0))
    tl.store(line + 6, tl.max(amax, 0))


@triton.jit
def _merged(lines, num_lines, CHUNK: tl.constexpr, ENERGY: tl.constexpr):
    """Over all lines: NaN and Inf (int64), bits of the amax, first non-finite element, energy."""
    num_nan = tl.zeros([CHUNK], tl.int64)
    num_inf = tl.zeros([CHUNK], tl.int64)
    amax = tl.zeros([CHUNK], tl.int32)
    first = tl.full([CHUNK], NEVER, tl.int64)
    energy = tl.zeros([CHUNK], tl.float64)
    start = tl.full([], 0, tl.int32)
    while start < num_lines:
        index = start + tl.arange(0, CHUNK)
        start += CHUNK
        here = index < num_lines
        line = lines + index.to(tl.int64) * WORDS
        num_nan += tl.load(line + 4, mask=here, other=0).to(tl.int64)
        num_inf += tl.load(line + 5, mask=here, other=0).to(tl.int64)
        amax = tl.maximum(amax, tl.load(line + 6, mask=here, other=0))
        first = tl.minimum(first, tl.load(line.to(tl.pointer_type(tl.int64)) + 1, mask=here, other=NEVER))
        if ENERGY:
            energy += tl.load(line.to(tl.pointer_type(tl.float64)), mask=here, other=0.0)
    return tl.sum(num_nan, 0), tl.sum(num_inf, 0), tl.max(amax, 0), tl.min(first, 0), tl.sum(energy, 0)


@triton.jit(do_not_specialize=["row", "num_lines", "num_elements", "N", "call_order", "measured"])
def merge_kernel(
    lines, buffer, row, num_lines, num_elements, N, call_order, measured, CHUNK: tl.constexpr, ENERGY: tl.constexpr
):
    """Merge a look into the row of its probe."""
    num_nan, num_inf, amax, first, energy = _merged(lines, num_lines, CHUNK, ENERGY)
    at = buffer + row.to(tl.int64) * ITEMSIZE
    row8, row4 = at.to(tl.pointer_type(tl.int64)), at.to(tl.pointer_type(tl.int32))
    elements, tiles = row8 + ELEMENTS_I8, row4 + TILES_I4
    tl.store(elements, tl.load(elements) + num_elements)
    tl.store(elements + 4, tl.load(elements + 4) + num_nan)
    tl.store(elements + 5, tl.load(elements + 5) + num_inf)
    tl.store(tiles, tl.load(tiles) + 1)
    tl.store(tiles + 1, tl.load(tiles + 1) + (amax == 0).to(tl.int32))
    tl.store(tiles + 3, tl.load(tiles + 3) + (num_inf > 0).to(tl.int32))
    tl.store(tiles + 5, tl.load(tiles + 5) + 1)
    # floor(log2(amax / 1.75)) + 48, as of tiles
    bucket = tl.where(amax == 0, 0, tl.minimum(tl.maximum(((amax + (1 << 21)) >> 23) - 80, 1), 63))
    hist = row4 + HIST_I4 + bucket
    tl.store(hist, tl.load(hist) + 1)
    top = row4 + MAXIMA_F4  # magnitudes are ordered as their bits
    if amax > tl.load(top):
        tl.store(row4 + WORST_I4, 0)
        tl.store(row4 + WORST_I4 + 1, 0)
        tl.store(top, amax)
    low = row4 + MINIMA_F4
    if (amax > 0) & (amax < tl.load(low)):
        tl.store(low, amax)
    if ENERGY:
        signal = row8.to(tl.pointer_type(tl.float64)) + ENERGIES_F8
        tl.store(signal, tl.load(signal) + energy)
    if (first != NEVER) & (tl.load(row4 + FIRST_I4) < 0):
        tl.store(row4 + FIRST_I4, (first // N).to(tl.int32))
        tl.store(row4 + FIRST_I4 + 1, (first % N).to(tl.int32))
        tl.store(row4 + FIRST_I4 + 2, call_order)
    order = tl.load(row4 + ORDER_I4)
    tl.store(row4 + ORDER_I4, tl.where(order < 0, call_order, order))
    before = tl.load(row4 + MEASURED_I4)
    tl.store(row4 + MEASURED_I4, (before | measured) & ~(lacking(before) | lacking(measured)))


@triton.jit(do_not_specialize=["row", "num_lines"])
def merge_output_kernel(lines, buffer, row, num_lines, CHUNK: tl.constexpr, NAN_ONLY: tl.constexpr):
    """Add what is not finite in a GEMM's output to the row of the operand that it reads."""
    num_nan, num_inf, _amax, _first, _energy = _merged(lines, num_lines, CHUNK, False)
    count = num_nan if NAN_ONLY else num_nan + num_inf
    at = buffer + row.to(tl.int64) * ITEMSIZE
    into = at.to(tl.pointer_type(tl.int64)) + OUTPUTS_I8
    measured = at.to(tl.pointer_type(tl.int32)) + MEASURED_I4
    tl.store(into, tl.load(into) + count)
    tl.store(measured, tl.load(measured) | tl.where(count > 0, OUTPUTS, 0))


def serves(y: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether there are kernels for an output, and for rows there."""
    return (
        type(y) is torch.Tensor and y.dtype in DTYPES and y.dim() == 2 and y.numel() > 0 and y.device == buffer.device
    )


def look_into(y: torch.Tensor, buffer: torch.Tensor, row: int, call_order: int, *, energy: bool) -> None:
    """Merge a look into `buffer[row]` (uint8 [capacity, ROW.itemsize]), in place.

    Args:
        y: [M, N], as `serves` wants it.
        call_order: place in the step's order of execution.
        energy: with Σ y² of what is finite.
    """
    measured = int(Measured.COUNTS | Measured.AMAX) | (int(Measured.ENERGIES) if energy else 0)
    with on_device_of(y):
        lines, num_lines = _lines_of(y, energy)
        merge_kernel[(1,)](
            lines,
            buffer,
            row,
            num_lines,
            y.numel(),
            y.shape[1],
            call_order,
            measured,
            CHUNK=CHUNK,
            ENERGY=energy,
            num_warps=1,
        )


def count_into(y: torch.Tensor, buffer: torch.Tensor, row: int, *, nan_only: bool) -> None:
    """Add how many elements of a GEMM's output are not finite to `buffer[row]`.

    Args:
        y: [M, N], as `serves` wants it.
        nan_only: Inf is no fault: finite operands may overflow float16.
    """
    with on_device_of(y):
        lines, num_lines = _lines_of(y, energy=False)
        merge_output_kernel[(1,)](lines, buffer, row, num_lines, CHUNK=CHUNK, NAN_ONLY=nan_only, num_warps=1)


def _lines_of(y: torch.Tensor, energy: bool) -> tuple[torch.Tensor, int]:
    """The lines of all programs, int32 [programs, WORDS], and how many there are."""
    block = INTERPRETED_BLOCK if type(look_kernel).__name__ == "InterpretedFunction" else BLOCK
    num_lines = -(-y.numel() // (block * TIMES))
    lines = torch.empty((num_lines, WORDS.value), dtype=torch.int32, device=y.device)
    look_kernel[(num_lines,)](
        y, lines, y.numel(), y.shape[1], *y.stride(), BLOCK=block, TIMES=TIMES, DENSE=y.is_contiguous(), ENERGY=energy
    )
    return lines, num_lines
