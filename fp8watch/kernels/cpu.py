"""The cpu backend: quantisation and statistics in one pass of C, compiled at first use. Equal to the reference.

Shapes:     x [M, K] -> codes, values [M, K] or nothing, scale_inv [Mt, Kt], one folded row     Thread: training

The library knows no Python: it gets pointers and writes into tensors that are made here. It runs without the
interpreter's lock, and on more than one thread where the operand is large and torch may use them; the result does not
depend on how many.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8watch.kernels import cpu_library, reference
from fp8watch.kernels.backend import Quantized, Scales
from fp8watch.kernels.cpu_compiler import FILLS, FILLS_SAMPLED, Unavailable
from fp8watch.numerics.operand_checks import check_denormals, check_operand, check_scale, check_tile_shape
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import ROW

NAME = "cpu"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {"E4M3": 0, "E5M2": 1}
_THREADED_ELEMENTS = 1 << 19
_JOB = struct.Struct("P5q6P9if")  # struct job in job.h
_CODES, _VALUES, _NOTHING = 0, 1, 2
_empty = functools.partial(torch.empty, device="cpu")  # torch's default device and dtype may be anything
# a tensor that makes others like itself takes half as long as torch.empty
_new_f32 = _empty(0, dtype=torch.float32).new_empty
_new_u8 = _empty(0, dtype=torch.uint8).new_empty
_no_output = _empty(0, dtype=torch.float32)


def probe(device: torch.device) -> str | None:
    """Why the library cannot be had here, or None."""
    if device.type != "cpu":
        return f"serves cpu tensors, not {device.type}"
    try:
        cpu_library.load()
    except Unavailable as reason:
        return str(reason)
    return None


@dataclass(slots=True)
class _Folded:
    """One call as a row, and of each tile its amax and eight small integers; in one piece of memory, because what is
    made anew for each call costs more than what is computed for it."""

    piece: torch.Tensor  # uint8: ROW, marks, amax
    address: int  # of the piece
    num_bytes: int
    num_tiles: tuple[int, int]
    mark_type: torch.dtype

    @property
    def marks(self) -> torch.Tensor:
        """[Mt, Kt, 8]: non-zero, saturated, underflow, NaN, Inf, flags, 0, 0."""
        mt, kt = self.num_tiles
        return self.piece[ROW.itemsize : -4 * mt * kt].view(self.mark_type).view(mt, kt, 8)

    @property
    def amax(self) -> torch.Tensor:
        mt, kt = self.num_tiles
        return self.piece[-4 * mt * kt :].view(torch.float32).view(mt, kt)

    @property
    def counts(self) -> torch.Tensor:
        return self.marks[..., :5].movedim(-1, 0)

    @property
    def flags(self) -> torch.Tensor:
        return self.marks[..., 5].to(torch.uint8)

    def release(self) -> None:
        """The row lies in one piece with what stays."""

    def merge_into(self, buffer: torch.Tensor, row: int, call_order: int) -> None:
        into = buffer.data_ptr() + row * ROW.itemsize
        cpu_library.load().fp8watch_merge(into, self.address, call_order)


class _Call(NamedTuple):
    """One direction of one operand: what the library reads, and the tensors that it fills."""

    job: bytes
    out: torch.Tensor
    scale_inv: torch.Tensor
    stats: TileStats | None
    keep: tuple[torch.Tensor, ...]  # alive until the library is done


def quantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `fp8watch.kernels.reference.quantize`."""
    call = _prepare(_readable(x), job, scale, _CODES)
    _checked(cpu_library.load().fp8watch_quantize(call.job))
    return call.out.view(job.fmt.dtype), call.scale_inv, call.stats


def quantize_dequantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `fp8watch.kernels.reference.quantize_dequantize`."""
    call = _prepare(_readable(x), job, scale, _VALUES)
    _checked(cpu_library.load().fp8watch_quantize(call.job))
    return call.out, call.scale_inv, call.stats


def quantize_dequantize_both(
    x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[Quantized, Quantized]:
    """As `fp8watch.kernels.backend.quantize_dequantize_both`, from one read of the operand."""
    row, column = _both(x, job, scales, _VALUES)
    return row[1:4], column[1:4]


def measure(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> TileStats:
    """As `fp8watch.kernels.backend.measure`: reads the operand, and writes nothing of its size."""
    call = _prepare(_readable(x), job, scale, _NOTHING)
    _checked(cpu_library.load().fp8watch_quantize(call.job))
    assert call.stats is not None
    return call.stats


def measure_both(x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None) -> tuple[TileStats, TileStats]:
    """As `fp8watch.kernels.backend.measure_both`, from one read of the operand."""
    row, column = _both(x, job, scales, _NOTHING)
    assert row.stats is not None
    assert column.stats is not None
    return row.stats, column.stats


def _both(x: torch.Tensor, job: QuantizeJob, scales: Scales | None, kind: int) -> tuple[_Call, _Call]:
    x = _readable(x)
    rowwise, columnwise = scales or (None, None)
    row, column = _prepare(x, job, rowwise, kind), _prepare(x, job._transposed or job.transposed(), columnwise, kind)
    _checked(cpu_library.load().fp8watch_quantize_both(row.job, column.job))
    return row, column


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
    """As `fp8watch.kernels.reference.dequantize`."""
    known = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}.get(data.dtype)
    if known is None:
        return reference.dequantize(data, scale_inv, tile_shape)
    bm, bk = check_tile_shape(tile_shape)
    rows, columns = data.shape
    check_scale(scale_inv, (-(-rows // bm), -(-columns // bk)), data)
    check_denormals(data)
    data, scale_inv = data.detach().contiguous(), scale_inv.detach().contiguous()
    out = _empty((rows, columns), dtype=torch.float32)
    cpu_library.load().fp8watch_dequantize(
        data.data_ptr(), scale_inv.data_ptr(), out.data_ptr(), rows, columns, bm, bk, known
    )
    return out


def _checked(status: int) -> None:
    if status:
        raise MemoryError("no memory for the working space of quantisation: a few MiB a thread are needed")


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The operand, checked, with its rows in one piece each; a copy where it is not so."""
    check_operand(x)
    if not x.is_cpu:
        raise ValueError(f"x is on {x.device}: the cpu backend serves cpu tensors; use backend=None or move x")
    check_denormals(x)
    reference.keep_freed_memory()
    x = x.detach()
    if type(x) is not torch.Tensor:  # a subclass may hold its values elsewhere: its own pointer is null
        x = _empty(x.shape, dtype=x.dtype).copy_(x)
    if x.is_conj() or x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _wide(size: int) -> torch.dtype:
    """The narrowest integers that can count the elements of a tile, where a byte cannot."""
    return torch.int16 if size < 1 << 15 else torch.int32 if size < 1 << 31 else torch.int64


def _prepare(x: torch.Tensor, job: QuantizeJob, given: torch.Tensor | None, kind: int) -> _Call:
    """Make the tensors for the answer, and the job in the library's words."""
    bm, bk = job.tile
    rows, columns = x.shape
    mt, kt = -(-rows // bm), -(-columns // bk)
    if given is not None:
        given = check_scale(given, (mt, kt), x).detach().contiguous()
    out = _no_output if kind == _NOTHING else _new_u8(x.shape) if kind == _CODES else _new_f32(x.shape)
    scale_inv = _new_f32((mt, kt))
    measured: TileStats | None = None
    amax_at = marks_at = row_at = mark_bytes = 0
    if job.stats:
        size = bm * bk if bm <= rows and bk <= columns else min(bm, rows) * min(bk, columns)
        mark_type = torch.uint8 if size <= 255 else _wide(size)
        mark_bytes, bits = mark_type.itemsize, FILLS_SAMPLED if job.heavy else FILLS
        num_bytes = ROW.itemsize + (8 * mark_bytes + 4) * mt * kt
        piece = _new_u8(num_bytes)
        row_at = piece.data_ptr()
        marks_at = row_at + ROW.itemsize
        amax_at = marks_at + 8 * mark_bytes * mt * kt
        folded = _Folded(piece, row_at, num_bytes, (mt, kt), mark_type)
        measured = TileStats((rows, columns), job.tile, job.power_2_scale, job.eps, scale_inv, bits, folded=folded)
    threads = torch.get_num_threads() if rows * columns >= _THREADED_ELEMENTS else 1
    packed = _JOB.pack(
        x.data_ptr(), x.stride(0), rows, columns, bm, bk,
        0 if given is None else given.data_ptr(), out.data_ptr(), scale_inv.data_ptr(), amax_at, marks_at, row_at,
        mark_bytes, _DTYPES[x.dtype], _FORMATS[job.fmt.name], job.power_2_scale, job.zero_guard, job.invariant,
        job.stats + job.heavy, kind, threads, job.eps,
    )  # fmt: skip
    return _Call(packed, out, scale_inv, measured, (x,) if given is None else (x, given))
