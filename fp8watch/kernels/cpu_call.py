"""One call of the C library: what does not change is prepared once for a job and a shape, what it fills is made anew.

Shapes:     x [M, K] -> codes, values [M, K] or nothing, scale_inv [Mt, Kt], one folded row     Thread: training

What is measured of both directions lies in one piece of memory, because what is made anew for each call costs more than
what is computed for it.
"""

from __future__ import annotations

import functools
import struct
import threading
from typing import Any, NamedTuple

import torch

from fp8watch.kernels import cpu_library
from fp8watch.kernels.backend import Into, Quantized
from fp8watch.kernels.cpu_compiler import FILLS, FILLS_SAMPLED
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import ROW, TileFlag

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES, VALUES, NOTHING = 0, 1, 2
_FORMATS = {"E4M3": 0, "E5M2": 1}
THREADED_ELEMENTS = 1 << 19
_MAX_SHAPES = 256  # prepared for one job: where every step has another length, memory stays bounded
_JOB = struct.Struct("P5q6P9ifP")  # struct job in job.h
_BLOCK_BYTES = 1 << 20
_empty = functools.partial(torch.empty, device="cpu")  # torch's default device and dtype may be anything
# a tensor that makes others like itself takes half as long as torch.empty
_new_f32 = _empty(0, dtype=torch.float32).new_empty
_new_u8 = _empty(0, dtype=torch.uint8).new_empty
_NEW_CODES = {name: _empty(0, dtype=fmt.dtype).new_empty for name, fmt in FORMATS.items()}
_no_output = _empty(0, dtype=torch.float32)

Scale = torch.Tensor | None
Kinds = tuple[int, ...]
"""One of CODES, VALUES and NOTHING for each direction."""


class Direction(NamedTuple):
    """One direction of an operand of known shape, and where in a call's memory what is measured of it lies, in bytes."""

    job: QuantizeJob
    shape: tuple[int, int]
    num_tiles: tuple[int, int]
    mark_type: torch.dtype
    measured: int  # bits of Measured; 0: nothing
    row_at: int
    marks_at: int
    amax_at: int
    scale_at: int
    num_bytes: int  # of all that


class Prepared(NamedTuple):
    """All that is known of a call before its operand is."""

    jobs: bytes  # struct job, one a direction
    directions: tuple[Direction, ...]
    num_bytes: int  # of a call's memory, with all of its directions
    is_large: bool  # worth more than one thread


class Measured(TileStats):
    """One direction of a call: its row, and of each tile the amax and eight small integers, where the library put them.

    Tensors are made of that memory when somebody asks for them, which is seldom. It is its own `Folded`.
    """

    __slots__ = ("at", "memory", "num_bytes", "start")

    def __init__(self, at: Direction, memory: torch.Tensor, start: int) -> None:
        self.at, self.memory, self.start = at, memory, start
        self.num_bytes = at.num_bytes  # type: ignore[misc]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the operand, M × K."""
        return self.at.shape

    @property
    def tile_shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Rows × columns."""
        return self.at.job.tile

    @property
    def power_2_scale(self) -> bool:  # type: ignore[override]
        """Whether scales are powers of two."""
        return self.at.job.power_2_scale

    @property
    def eps(self) -> float:  # type: ignore[override]
        """Floor of the amax."""
        return self.at.job.eps

    @property
    def measured(self) -> int:  # type: ignore[override]
        """Bits of Measured."""
        return self.at.measured

    @property
    def tiles(self) -> None:  # type: ignore[override]
        """Nothing in plain torch."""

    @property
    def folded(self) -> Measured:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def scale_inv(self) -> torch.Tensor:  # type: ignore[override]
        """float32 [Mt, Kt]."""
        return self._floats(self.at.scale_at)

    @property
    def amax(self) -> torch.Tensor:
        """float32 [Mt, Kt]."""
        return self._floats(self.at.amax_at)

    @property
    def marks(self) -> torch.Tensor:
        """[Mt, Kt, 8]: non-zero, saturated, underflow, NaN, Inf, flags, 0, 0."""
        marks = self.memory[self.start + self.at.marks_at : self.start + self.at.amax_at]
        return marks.view(self.at.mark_type).view(*self.at.num_tiles, 8)

    @property
    def counts(self) -> torch.Tensor:
        """[5, Mt, Kt]."""
        return self.marks[..., :5].movedim(-1, 0)

    def flags(self) -> torch.Tensor:
        """uint8 [Mt, Kt]."""
        return self.marks[..., 5].to(torch.uint8)

    @property
    def off_scale(self) -> torch.Tensor:
        """bool [Mt, Kt]."""
        return (self.flags() & int(TileFlag.OFF_SCALE)) != 0

    def release(self) -> None:
        """The row lies in one piece with what stays."""

    def merge_into(self, buffer: torch.Tensor, row: int, call_order: int) -> None:
        """Into `buffer[row]`, as a call that comes after what is there."""
        here = self.memory.data_ptr() + self.start + self.at.row_at
        cpu_library.load().fp8watch_merge(buffer.data_ptr() + row * ROW.itemsize, here, call_order)

    def _floats(self, at: int) -> torch.Tensor:
        mt, kt = self.at.num_tiles
        return self.memory[self.start + at : self.start + at + 4 * mt * kt].view(torch.float32).view(mt, kt)


class _Memory(threading.local):
    """Where observed calls of a thread leave what they measured, one behind the other: a block lives as long as what lies
    in it is held. Pieces of their own, held for a few steps, would tear up the heap that training allocates from."""

    block, at, used, size = _no_output, 0, 0, 0

    def take(self, num_bytes: int) -> int:
        """Bytes of `block` that nobody else has: from where on."""
        if self.used + num_bytes > self.size:
            self.size, self.used = max(_BLOCK_BYTES, num_bytes), 0
            self.block = _new_u8(self.size)
            self.at = self.block.data_ptr()
        start, self.used = self.used, self.used + num_bytes
        return start


_memory = _Memory()


def call(
    x: torch.Tensor, job: QuantizeJob, kinds: Kinds, *, given: tuple[Scale, Scale] = (None, None)
) -> tuple[Quantized, ...]:
    """Run the library on an operand; returns one result a direction.

    Args:
        x: [M, K] with rows in one piece each.
        job: of the direction, or of the rowwise one.
        kinds: CODES, VALUES or NOTHING: what the first part of a result is. Two: the columnwise direction as well, from
            the same read.
        given: scales to use, checked and contiguous.

    Raises:
        MemoryError: no working space.
    """
    known = job.prepared.get((x.shape, x.dtype, kinds)) or prepare(x, job, kinds)
    directions = known.directions
    first, last = directions[0], directions[-1]
    out, scale = _output(kinds[0], x.shape, first), _new_f32(first.num_tiles)
    both = len(directions) == 2
    out_t, scale_t = (_output(kinds[1], x.shape, last), _new_f32(last.num_tiles)) if both else (out, scale)
    piece = _new_u8(known.num_bytes) if job.stats else None
    one, other = given
    status = cpu_library.load().fp8watch_operand(
        known.jobs, len(directions), x.data_ptr(), x.stride(0), None if one is None else one.data_ptr(),
        None if other is None else other.data_ptr(), out.data_ptr(), out_t.data_ptr(), scale.data_ptr(),
        scale_t.data_ptr(), None, None, None if piece is None else piece.data_ptr(),
        torch.get_num_threads() if known.is_large else 1, None, None, -1,
    )  # fmt: skip
    if status:
        raise MemoryError(_NO_MEMORY)
    if piece is None:
        return ((out, scale, None), (out_t, scale_t, None)) if both else ((out, scale, None),)
    found = []
    for made, its_scale, at in zip((out, out_t), (scale, scale_t), directions, strict=False):
        measured = Measured(at, piece, 0)
        measured.scale_inv.copy_(its_scale)
        found.append((made, its_scale, measured))
    return tuple(found)


def call_into(x: torch.Tensor, job: QuantizeJob, kinds: Kinds, into: Into) -> tuple[list[Any], list[TileStats]]:
    """As `call` of a job with statistics, merged into rows of a slab: values, or codes and scale_inv, and statistics, one
    a direction.

    Raises:
        MemoryError: no working space.
    """
    known = job.prepared.get((x.shape, x.dtype, kinds)) or prepare(x, job, kinds)
    memory, directions = _memory, known.directions
    start = memory.take(known.num_bytes)
    block, at, first, last = memory.block, memory.at + start, directions[0], directions[-1]
    # what is measured lies in memory that is held for some steps: scales that go along with codes are written a second time
    kind, kind_t = kinds[0], kinds[-1]
    out = None if kind == NOTHING else _output(kind, x.shape, first)
    kept = _new_f32(first.num_tiles) if kind == CODES else None
    out_t, kept_t = out, None
    if both := len(kinds) == 2:
        out_t = None if kind_t == NOTHING else _output(kind_t, x.shape, last)
        kept_t = _new_f32(last.num_tiles) if kind_t == CODES else None
    _, (row, row_t), order = into
    status = cpu_library.load().fp8watch_operand(
        known.jobs, len(directions), x.data_ptr(), x.stride(0), None, None, None if out is None else out.data_ptr(),
        None if out_t is None else out_t.data_ptr(), at + first.scale_at, at + last.scale_at,
        None if kept is None else kept.data_ptr(), None if kept_t is None else kept_t.data_ptr(), at,
        torch.get_num_threads() if known.is_large else 1, row, row_t, order,
    )  # fmt: skip
    if status:
        raise MemoryError(_NO_MEMORY)
    outs: list[Any] = [] if out is None else [out if kept is None else (out, kept)]
    seen: list[TileStats] = [Measured(first, block, start)]
    if both:
        if out_t is not None:
            outs.append(out_t if kept_t is None else (out_t, kept_t))
        seen.append(Measured(last, block, start))
    return outs, seen


_NO_MEMORY = "no memory for the working space of quantisation: a few MiB a thread are needed"


def _output(kind: int, shape: torch.Size, at: Direction) -> torch.Tensor:
    """Memory for what a direction gives: values, or codes as numbers of their format."""
    if kind == VALUES:
        return _new_f32(shape)
    return _no_output if kind == NOTHING else _NEW_CODES[at.job.fmt.name](shape)


def _wide(size: int) -> torch.dtype:
    """The narrowest integers that can count the elements of a tile, where a byte cannot."""
    return torch.int16 if size < 1 << 15 else torch.int32 if size < 1 << 31 else torch.int64


def prepare(x: torch.Tensor, job: QuantizeJob, kinds: Kinds) -> Prepared:
    """Work out what the library is told of each call with such an operand, and remember it.

    Raises:
        ValueError: both directions of tiles that are not one row high: the library would write beside what it is given.
    """
    if len(kinds) == 2 and job.tile[0] != 1:
        raise ValueError(
            f"both directions of {job.tile[0]}×{job.tile[1]} tiles in one call: the rowwise tile must be 1 high; quantise each direction"
        )
    rows, columns = int(x.shape[0]), int(x.shape[1])
    packed, places, at = b"", [], 0
    for kind, one in zip(kinds, (job, job.transposed()) if len(kinds) == 2 else (job,), strict=True):
        bm, bk = one.tile
        mt, kt = -(-rows // bm), -(-columns // bk)
        size = bm * bk if bm <= rows and bk <= columns else min(bm, rows) * min(bk, columns)
        mark_type = torch.uint8 if size <= 255 else _wide(size)
        marks_at = at + ROW.itemsize
        amax_at = marks_at + 8 * mark_type.itemsize * mt * kt
        places.append((one, (mt, kt), mark_type, at, marks_at, amax_at))
        at = amax_at + _floats_bytes(mt * kt)
        packed += _JOB.pack(
            0, 0, rows, columns, bm, bk, 0, 0, 0, 0, 0, 0, mark_type.itemsize, DTYPES[x.dtype], _FORMATS[one.fmt.name],
            one.power_2_scale, one.force_scale_1, one.invariant, one.stats + one.heavy, kind, 1, one.eps, 0,
        )  # fmt: skip
    directions = []
    for one, (mt, kt), mark_type, row_at, marks_at, amax_at in places:
        bits = (FILLS_SAMPLED if one.heavy else FILLS) if one.stats else 0
        num_bytes = amax_at - row_at + 2 * _floats_bytes(mt * kt)
        shape, num_tiles = (rows, columns), (mt, kt)
        directions.append(
            Direction(
                one, shape, num_tiles, mark_type, bits, row_at, marks_at, amax_at, scale_at=at, num_bytes=num_bytes
            )
        )
        at += _floats_bytes(mt * kt)
    made = Prepared(packed, tuple(directions), -(-at // 64) * 64, rows * columns >= THREADED_ELEMENTS)
    if len(job.prepared) >= _MAX_SHAPES:
        job.prepared.clear()
    job.prepared[x.shape, x.dtype, kinds] = made
    return made


def _floats_bytes(n: int) -> int:
    """Of n float32, so that numbers of eight bytes may follow."""
    return 4 * (n + n % 2)
