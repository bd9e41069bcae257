"""Folding the partial sketches of a call, and merging them into a row of the slab, in one launch.

Shapes:     workspace [programs, WORDS] int32 -> one row of ROW, in place     Thread: device

The lines are read in a fixed order and each field is written by one program, so the same lines give the same row.
Nothing is read back to the host: a CUDA graph may capture it. Merging has the meaning of
fp8watch_agent.record.merge_rows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from fp8watch.kernels.triton_cast import NAN_BITS, float_of
from fp8watch.kernels.triton_partials import (
    AMAX_HIST,
    COUNTS,
    DEPTH_HIST,
    EXTREMES,
    FIRST,
    INF,
    NAN,
    NAN_SCALES,
    NEVER,
    NOISE_TILE,
    NOWHERE,
    OFF_SCALE_TILES,
    OFF_TILE,
    SATURATED,
    SUMS,
    UNDERFLOW,
    WORDS,
    WORST_TILE,
    ZERO_TILES,
)
from fp8watch_agent.record import EVERY_CALL, LAYOUT, ROW, WITH_ENERGIES, Measured

_SECTIONS = (  # fields that one program writes as a vector: they must lie side by side
    ("signal_energy", "noise_energy", "tile_noise_ratio_sum", "moment2", "moment4", "tile_noise_ratio_max"),
    ("num_elements", "num_nonzero", "num_saturated", "num_underflow", "num_nan", "num_inf"),
    ("num_tiles", "num_zero_tiles", "num_eps_tiles", "num_sentinel_tiles", "num_off_scale_tiles", "num_calls"),
    ("amax_max", "scale_inv_max", "scale_ratio_max"),
    ("amax_min_nonzero", "scale_inv_min", "scale_ratio_min"),
)


def place(name: str, size: int) -> tl.constexpr:
    """Index of a field in a row that is read as an array of items of that size."""
    assert ROW.fields is not None
    return tl.constexpr(int(ROW.fields[name][1]) // size)


def _side_by_side() -> bool:
    names = [f.name for f in LAYOUT]
    return all(names[(i := names.index(s[0])) : i + len(s)] == list(s) for s in _SECTIONS)


if not _side_by_side():
    raise ImportError("the fields of fp8watch_agent.record do not lie as the folding kernel writes them")

ITEMSIZE = tl.constexpr(ROW.itemsize)
ENERGIES_F8, NOISE_MAX_F8 = place("signal_energy", 8), place("tile_noise_ratio_max", 8)
GAIN_F8 = place("gain_energy", 8)
ELEMENTS_I8, DEPTH_I8 = place("num_elements", 8), place("depth_hist", 8)
TILES_I4, HIST_I4 = place("num_tiles", 4), place("amax_hist", 4)
MAXIMA_F4, MINIMA_F4 = place("amax_max", 4), place("amax_min_nonzero", 4)
WORST_I4, NOISE_I4 = place("worst_tile", 4), place("noise_tile", 4)
OFF_I4, FIRST_I4 = place("off_scale_tile", 4), place("first_nonfinite", 4)
ORDER_I4, MEASURED_I4 = place("order", 4), place("measured", 4)
NUM_ENERGIES, GAIN = tl.constexpr(5), tl.constexpr(6)
CALLS, BY_EVERY_CALL = tl.constexpr(int(Measured.COUNTS)), tl.constexpr(int(EVERY_CALL & ~WITH_ENERGIES))
ENERGIES, BY_ENERGIES = tl.constexpr(int(Measured.ENERGIES)), tl.constexpr(int(WITH_ENERGIES))

NUM_WORDS = int(WORDS.value)
"""Of one line."""

CHUNK = 256
"""Lines that a program reads at once."""

HIST_COLUMNS = 8
"""Columns of a histogram that one program sums: a sector of memory of each line."""

_NUMBERS = [
    "row", "num_lines", "num_elements", "num_tiles", "columns", "tile_columns", "call_order", "measured",
    "second_row", "second_tiles", "second_tile_columns",
]  # fmt: skip


@triton.jit
def _better(best, place, value, other):
    """The larger, and of two equals the earlier tile."""
    take = (value > best) | ((value == best) & (other < place))
    return tl.where(take, value, best), tl.where(take, other, place)


@triton.jit
def lacking(bits):
    """What fp8watch_agent.record.lacking says of `measured`."""
    asked = tl.where((bits & CALLS) != 0, BY_EVERY_CALL, 0) | tl.where((bits & ENERGIES) != 0, BY_ENERGIES, 0)
    return ~bits & asked


@triton.jit
def _fold_scalars(
    lines, row8, row4, num_lines, num_elements, num_tiles, columns, tile_columns, call_order, measured,
    WHOLE: tl.constexpr, HEAVY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 16)
    counts = tl.zeros([16], tl.int64)
    high = tl.full([CHUNK, 8], -float("inf"), tl.float32)
    low = tl.full([CHUNK, 8], float("inf"), tl.float32)
    first = tl.full([CHUNK], NEVER, tl.int64)
    worst = tl.full([CHUNK], -1.0, tl.float32)
    worst_at = tl.full([CHUNK], NOWHERE, tl.int32)
    off = tl.full([CHUNK], -1.0, tl.float32)
    off_at = tl.full([CHUNK], NOWHERE, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < num_lines:
        index = start + tl.arange(0, CHUNK)
        start += CHUNK
        here = index < num_lines
        line = lines + index.to(tl.int64) * WORDS
        wanted = here[:, None] & ((column < WORST_TILE) | (column == NAN_SCALES))[None, :]
        counts += tl.sum(tl.load(line[:, None] + COUNTS + column[None, :], mask=wanted, other=0).to(tl.int64), 0)
        floats = (line[:, None] + EXTREMES + tl.arange(0, 8)[None, :]).to(tl.pointer_type(tl.float32))
        written = here[:, None] & (tl.arange(0, 8) < 6)[None, :]  # nobody writes the last of the eight
        high = tl.maximum(high, tl.load(floats, mask=written, other=-float("inf")))
        low = tl.minimum(low, tl.load(floats, mask=written, other=float("inf")))
        first = tl.minimum(first, tl.load((line + FIRST).to(tl.pointer_type(tl.int64)), mask=here, other=NEVER))
        top = (line + EXTREMES).to(tl.pointer_type(tl.float32))
        worst, worst_at = _better(
            worst, worst_at, tl.load(top, mask=here, other=-1.0),
            tl.load(line + COUNTS + WORST_TILE, mask=here, other=NOWHERE),
        )  # fmt: skip
        off, off_at = _better(
            off, off_at, tl.load(top + 6, mask=here, other=-1.0),
            tl.load(line + COUNTS + OFF_TILE, mask=here, other=NOWHERE),
        )  # fmt: skip
    worst_at = tl.min(tl.where(worst == tl.max(worst, 0), worst_at, NOWHERE), 0)
    off_max = tl.max(off, 0)
    off_at = tl.min(tl.where(off == off_max, off_at, NOWHERE), 0)
    first_at = tl.min(first, 0)
    num_nan_scales = tl.sum(tl.where(column == NAN_SCALES, counts, 0), 0)

    # counts: num_elements, then the five of elements; num_tiles, then the four of tiles, then num_calls
    into = row8 + ELEMENTS_I8 + 1 + column
    five = column < ZERO_TILES
    tl.store(into, tl.load(into, mask=five, other=0) + counts, mask=five)
    tl.store(row8 + ELEMENTS_I8, tl.load(row8 + ELEMENTS_I8) + num_elements)
    into4 = row4 + TILES_I4 + 1 + column - ZERO_TILES
    four = (column >= ZERO_TILES) & (column <= OFF_SCALE_TILES)
    tl.store(into4, tl.load(into4, mask=four, other=0) + counts.to(tl.int32), mask=four)
    tl.store(row4 + TILES_I4, tl.load(row4 + TILES_I4) + num_tiles)
    tl.store(row4 + TILES_I4 + 5, tl.load(row4 + TILES_I4 + 5) + 1)

    # coordinates of the largest amax, before the maximum itself moves
    maxima = (row4 + MAXIMA_F4).to(tl.pointer_type(tl.float32))
    minima = (row4 + MINIMA_F4).to(tl.pointer_type(tl.float32))
    if tl.max(worst, 0) > tl.load(maxima):
        tl.store(row4 + WORST_I4, worst_at // tile_columns)
        tl.store(row4 + WORST_I4 + 1, worst_at % tile_columns)
    if (off_max > 0.0) & (tl.load(row4 + OFF_I4) < 0):
        tl.store(row4 + OFF_I4, off_at // tile_columns)
        tl.store(row4 + OFF_I4 + 1, off_at % tile_columns)
    if (first_at != NEVER) & (tl.load(row4 + FIRST_I4) < 0):
        tl.store(row4 + FIRST_I4, (first_at // columns).to(tl.int32))
        tl.store(row4 + FIRST_I4 + 1, (first_at % columns).to(tl.int32))
        tl.store(row4 + FIRST_I4 + 2, call_order)
    tl.debug_barrier()  # every thread has read the old maximum

    # a scale_inv that is no number is the largest and the smallest at once, and stays
    extreme = tl.arange(0, 8)
    nan = float_of(tl.full([8], NAN_BITS, tl.int32))
    no_number = (extreme == 1) & (num_nan_scales > 0)
    old = tl.load(maxima + extreme, mask=extreme < 3, other=0.0)
    new = tl.where(no_number | (old != old), nan, tl.maximum(old, tl.max(high, 0)))
    tl.store(maxima + extreme, new, mask=extreme < 3)
    into_min = minima + extreme - 3
    three = (extreme >= 3) & (extreme < 6)
    no_number = (extreme == 4) & (num_nan_scales > 0)
    old = tl.load(into_min, mask=three, other=0.0)
    new = tl.where(no_number | (old != old), nan, tl.minimum(old, tl.min(low, 0)))
    tl.store(into_min, new, mask=three)

    order = tl.load(row4 + ORDER_I4)
    tl.store(row4 + ORDER_I4, tl.where(order < 0, call_order, order))
    before = tl.load(row4 + MEASURED_I4)
    tl.store(row4 + MEASURED_I4, (before | measured) & ~(lacking(before) | lacking(measured)))

    if HEAVY:
        _fold_energies(lines, row8, row4, num_lines, tile_columns, WHOLE, CHUNK)


@triton.jit
def _fold_energies(lines, row8, row4, num_lines, tile_columns, WHOLE: tl.constexpr, CHUNK: tl.constexpr):
    column = tl.arange(0, 8)
    parts = tl.zeros([CHUNK, 8], tl.float64)
    noise = tl.full([CHUNK], -1.0, tl.float64)
    noise_at = tl.full([CHUNK], NOWHERE, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < num_lines:
        index = start + tl.arange(0, CHUNK)
        start += CHUNK
        here = index < num_lines
        line = lines + index.to(tl.int64) * WORDS
        words = (line + SUMS).to(tl.pointer_type(tl.float64))
        parts += tl.load(
            words[:, None] + column[None, :],
            mask=here[:, None] & ((column < NUM_ENERGIES) | (column == GAIN))[None, :], other=0.0,
        )  # fmt: skip
        noise, noise_at = _better(
            noise, noise_at, tl.load(words + NUM_ENERGIES, mask=here, other=-1.0),
            tl.load(line + COUNTS + NOISE_TILE, mask=here, other=NOWHERE),
        )  # fmt: skip
    sums = tl.sum(parts, 0)
    noise_max = tl.max(noise, 0)
    noise_at = tl.min(tl.where(noise == noise_max, noise_at, NOWHERE), 0)
    if WHOLE:  # the one tile's noise and signal were spread over all programs
        signal = tl.sum(tl.where(column == 0, sums, 0.0), 0)
        error = tl.sum(tl.where(column == 1, sums, 0.0), 0)
        noise_max = tl.where(signal > 0.0, error / tl.where(signal > 0.0, signal, 1.0), 0.0)
        noise_at = 0
        sums = tl.where(column == 2, noise_max, sums)
    into = row8.to(tl.pointer_type(tl.float64)) + ENERGIES_F8 + column
    five = column < NUM_ENERGIES
    tl.store(into, tl.load(into, mask=five, other=0.0) + sums, mask=five)
    into_gain = row8.to(tl.pointer_type(tl.float64)) + GAIN_F8
    tl.store(into_gain, tl.load(into_gain) + tl.sum(tl.where(column == GAIN, sums, 0.0), 0))
    into_max = row8.to(tl.pointer_type(tl.float64)) + NOISE_MAX_F8
    old = tl.load(into_max)
    if noise_max > old:
        tl.store(row4 + NOISE_I4, noise_at // tile_columns)
        tl.store(row4 + NOISE_I4 + 1, noise_at % tile_columns)
    tl.debug_barrier()  # every thread has read the old maximum
    tl.store(into_max, tl.maximum(old, noise_max))


@triton.jit
def _sum_columns(lines, first_word, num_lines, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over all lines of the words from first_word on: int64 [COLUMNS]."""
    sums = tl.zeros([COLUMNS], tl.int64)
    start = tl.full([], 0, tl.int32)
    while start < num_lines:
        index = start + tl.arange(0, CHUNK)
        start += CHUNK
        words = lines + index.to(tl.int64)[:, None] * WORDS + first_word + tl.arange(0, COLUMNS)[None, :]
        sums += tl.sum(tl.load(words, mask=(index < num_lines)[:, None], other=0).to(tl.int64), 0)
    return sums


@triton.jit(do_not_specialize=_NUMBERS)
def fold_kernel(
    lines, buffer, row, num_lines, num_elements, num_tiles, columns, tile_columns, call_order, measured,
    second_row, second_tiles, second_tile_columns,
    WHOLE: tl.constexpr, HEAVY: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Program 0 folds the scalars, the next 64 / COLUMNS the histogram of amax, the last 32 / COLUMNS that of depth. With BOTH as many
    more do the same with as many lines behind these, of the other direction of the operand."""
    pid = tl.program_id(0)
    if BOTH:
        EACH: tl.constexpr = 1 + (64 + (32 if HEAVY else 0)) // COLUMNS
        second = pid // EACH
        pid = pid % EACH
        lines += second.to(tl.int64) * num_lines * WORDS
        row = tl.where(second == 1, second_row, row)
        num_tiles = tl.where(second == 1, second_tiles, num_tiles)
        tile_columns = tl.where(second == 1, second_tile_columns, tile_columns)
        call_order += second
    start = buffer + row.to(tl.int64) * ITEMSIZE
    row8 = start.to(tl.pointer_type(tl.int64))
    row4 = start.to(tl.pointer_type(tl.int32))
    if pid == 0:
        _fold_scalars(
            lines, row8, row4, num_lines, num_elements, num_tiles, columns, tile_columns, call_order, measured,
            WHOLE, HEAVY, CHUNK,
        )  # fmt: skip
    elif pid <= 64 // COLUMNS:
        bucket = (pid - 1) * COLUMNS
        into = row4 + HIST_I4 + bucket + tl.arange(0, COLUMNS)
        tl.store(into, tl.load(into) + _sum_columns(lines, AMAX_HIST + bucket, num_lines, CHUNK, COLUMNS).to(tl.int32))
    else:
        bucket = (pid - 1 - 64 // COLUMNS) * COLUMNS
        into8 = row8 + DEPTH_I8 + bucket + tl.arange(0, COLUMNS)
        tl.store(into8, tl.load(into8) + _sum_columns(lines, DEPTH_HIST + bucket, num_lines, CHUNK, COLUMNS))


@triton.jit(do_not_specialize=["num_lines"])
def whole_marks_kernel(lines, marks, num_lines, CHUNK: tl.constexpr):
    """The marks of an operand that is one tile: int64 [8], see FoldedLines.marks."""
    column = tl.arange(0, 16)
    counts = _sum_columns(lines, COUNTS, num_lines, CHUNK, 16)
    # the flags by the count that each stands for: NaN, Inf, sentinel, zero, eps, off-scale, saturated, underflow
    bit = tl.where(column == NAN, 1, 0) | tl.where(column == INF, 2, 0) | tl.where(column == ZERO_TILES + 2, 4, 0)
    bit = bit | tl.where(column == ZERO_TILES, 8, 0) | tl.where(column == ZERO_TILES + 1, 16, 0)
    bit = bit | tl.where(column == OFF_SCALE_TILES, 32, 0) | tl.where(column == SATURATED, 64, 0)
    bit = bit | tl.where(column == UNDERFLOW, 128, 0)
    flags = tl.sum(tl.where(counts > 0, bit, 0), 0)
    value = tl.where(column < ZERO_TILES, counts, tl.where(column == ZERO_TILES, flags, 0))
    tl.store(marks + column, value, mask=column < 8)


@dataclass
class FoldedLines:
    """What the programs of one call left, as fp8watch.numerics.tile_stats.Folded."""

    lines: torch.Tensor | None  # int32 [programs, WORDS]; None once they are merged and nothing else is in them
    amax: torch.Tensor  # float32 [Mt, Kt]
    tile_marks: torch.Tensor | None  # uint8 or int16 [Mt, Kt, 8]; None: the operand is one tile
    num_elements: int
    num_tiles: int
    columns: int
    tile_columns: int
    measured: int
    heavy: bool
    second: FoldedLines | None = None  # of the other direction, whose lines lie behind these

    @cached_property
    def marks(self) -> torch.Tensor:
        """Eight integers a tile: non-zero, saturated, underflow, NaN, Inf, TileFlag bits, and two that are 0."""
        if self.tile_marks is not None:
            return self.tile_marks
        assert self.lines is not None
        marks = torch.empty((1, 1, 8), dtype=torch.int64, device=self.lines.device)
        with on_device_of(marks):
            whole_marks_kernel[(1,)](self.lines, marks, self.lines.shape[0], CHUNK=CHUNK)
        return marks

    @property
    def num_bytes(self) -> int:
        """What is kept of the tiles."""
        return sum(kept.nbytes for kept in (self.lines, self.amax, self.tile_marks) if kept is not None)

    def release(self) -> None:
        """The lines are as large as the marks of many tiles. Of an operand that is one tile they are its marks."""
        self.second = None
        if self.tile_marks is not None:
            self.lines = None

    @property
    def counts(self) -> torch.Tensor:
        """Integers [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf."""
        return self.marks[..., :5].movedim(-1, 0)

    @property
    def flags(self) -> torch.Tensor:
        """TileFlag bits: uint8 [Mt, Kt]."""
        return self.marks[..., 5].to(torch.uint8)

    def merge_into(self, buffer: torch.Tensor, row: int, call_order: int) -> None:
        """Fold the lines into `buffer[row]` (uint8 [capacity, ROW.itemsize]), in place, in one launch."""
        self._merge(buffer, (row, row), call_order, None)

    def merge_both_into(self, buffer: torch.Tensor, rows: tuple[int, int], call_order: int) -> None:
        """`merge_into` of these lines and of the second's, in one launch; the second's is the next call."""
        assert self.second is not None
        self._merge(buffer, rows, call_order, self.second)

    def _merge(self, buffer: torch.Tensor, rows: tuple[int, int], call_order: int, second: FoldedLines | None) -> None:
        assert self.lines is not None
        if self.lines.device != buffer.device:  # a kernel would read and write the memory of another device
            raise ValueError(f"measured on {self.lines.device}, rows on {buffer.device}: must be one device")
        num_programs = 1 + (64 + (32 if self.heavy else 0)) // HIST_COLUMNS
        other = self if second is None else second
        with on_device_of(buffer):
            fold_kernel[(num_programs * (1 if second is None else 2),)](
                self.lines, buffer, rows[0], self.lines.shape[0], self.num_elements, self.num_tiles, self.columns,
                self.tile_columns, call_order, self.measured, rows[1], other.num_tiles, other.tile_columns,
                WHOLE=self.tile_marks is None, HEAVY=self.heavy, CHUNK=CHUNK, COLUMNS=HIST_COLUMNS,
                BOTH=second is not None, num_warps=4,
            )  # fmt: skip


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
