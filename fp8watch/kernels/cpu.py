"""The cpu backend: quantisation and statistics in one pass of C, compiled at first use. Equal to the reference.

Shapes:     x [M, K] -> codes, values [M, K] or nothing, scale_inv [Mt, Kt], one folded row     Thread: training

The library knows no Python: it gets pointers and writes into tensors that are made here. It runs without the
interpreter's lock, and on more than one thread where the operand is large and torch may use them; the result does not
depend on how many. Outputs on the CPU are looked at here too, under every backend: once, for their largest magnitude,
which tells whether all of them is finite. Where there is no compiler torch's own functions do that in twice the time.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from fp8watch.kernels import cpu_library, reference
from fp8watch.kernels.backend import Codes, Into, Quantized, Scales
from fp8watch.kernels.cpu_call import CODES, DTYPES, NOTHING, THREADED_ELEMENTS, VALUES, Kinds, call, call_into
from fp8watch.kernels.cpu_compiler import Unavailable
from fp8watch.numerics.operand_checks import (
    DOUBLE_SUBNORMAL,
    check_denormals,
    check_operand,
    check_scale,
    check_tile_shape,
)
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats

NAME = "cpu"
MERGES = True
"""What is measured goes straight into rows of a slab: see `fp8watch.kernels.backend.Into`."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KINDS: dict[tuple[bool, ...], Kinds] = {
    asked: tuple(CODES if c else VALUES for c in asked)
    for asked in ((False,), (True,), (False, False), (False, True), (True, False), (True, True))
}


def probe(device: torch.device) -> str | None:
    """Why the library cannot be had here, or None."""
    if device.type != "cpu":
        return f"serves cpu tensors, not {device.type}"
    try:
        cpu_library.load()
    except Unavailable as reason:
        return str(reason)
    return None


def quantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `fp8watch.kernels.reference.quantize`."""
    x = _readable(x)
    ((codes, scale_inv, stats),) = call(x, job, (CODES,), given=(_scale(scale, x, job), None))
    return codes, scale_inv, stats


def quantize_dequantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `fp8watch.kernels.reference.quantize_dequantize`."""
    x = _readable(x)
    return call(x, job, (VALUES,), given=(_scale(scale, x, job), None))[0]


def quantize_dequantize_both(
    x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[Quantized, Quantized]:
    """As `fp8watch.kernels.backend.quantize_dequantize_both`, from one read of the operand."""
    x = _readable(x)
    row, column = call(x, job, (VALUES, VALUES), given=_scales(scales, x, job))
    return row, column


def values_and_codes(
    x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[torch.Tensor, TileStats | None, Codes, TileStats | None]:
    """What a forward needs of an operand, from one read: rowwise what the codes stand for, columnwise the codes."""
    x = _readable(x)
    (values, _, of_row), (data, scale_inv, of_column) = call(x, job, (VALUES, CODES), given=_scales(scales, x, job))
    return values, of_row, (data, scale_inv), of_column


def measure(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> TileStats:
    """As `fp8watch.kernels.backend.measure`: reads the operand, and writes nothing of its size."""
    x = _readable(x)
    ((_, _, stats),) = call(x, job, (NOTHING,), given=(_scale(scale, x, job), None))
    assert stats is not None
    return stats


def measure_both(x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None) -> tuple[TileStats, TileStats]:
    """As `fp8watch.kernels.backend.measure_both`, from one read of the operand."""
    x = _readable(x)
    (_, _, row), (_, _, column) = call(x, job, (NOTHING, NOTHING), given=_scales(scales, x, job))
    assert row is not None
    assert column is not None
    return row, column


def values_into(
    x: torch.Tensor, job: QuantizeJob, into: Into, *, codes: tuple[bool, ...]
) -> tuple[list[Any], list[TileStats]]:
    """As `fp8watch.kernels.backend.Merging.values_into`."""
    return call_into(_readable(x), job, _KINDS[codes], into)


def measure_into(x: torch.Tensor, job: QuantizeJob, into: Into, *, both: bool) -> list[TileStats]:
    """As `fp8watch.kernels.backend.Merging.measure_into`."""
    return call_into(_readable(x), job, (NOTHING, NOTHING) if both else (NOTHING,), into)[1]


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
    """As `fp8watch.kernels.reference.dequantize`."""
    known = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}.get(data.dtype)
    if known is None:
        return reference.dequantize(data, scale_inv, tile_shape)
    (bm, bk), (rows, columns) = tile_shape, data.shape
    plain = bm > 0 < bk and scale_inv.dtype is torch.float32 and scale_inv.is_cpu and data.is_cpu
    if not plain or scale_inv.shape != (-(-rows // bm), -(-columns // bk)) or DOUBLE_SUBNORMAL * 1.0 == 0.0:
        bm, bk = check_tile_shape(tile_shape)
        check_scale(scale_inv, (-(-rows // bm), -(-columns // bk)), data)
        check_denormals(data)
    data, scale_inv = data.detach().contiguous(), scale_inv.detach().contiguous()
    out = torch.empty((rows, columns), dtype=torch.float32, device="cpu")
    cpu_library.load().fp8watch_dequantize(
        data.data_ptr(), scale_inv.data_ptr(), out.data_ptr(), rows, columns, bm, bk, known,
        torch.get_num_threads() if rows * columns >= THREADED_ELEMENTS else 1,
    )  # fmt: skip
    return out


def largest_magnitude(x: torch.Tensor) -> float:
    """max |x|: NaN where an element is NaN, else Inf where one is ±Inf.

    Args:
        x: any shape, floating, on the CPU, not empty.
    """
    dtype = _known_dtype(x)
    if dtype is not None:
        try:
            bits = cpu_library.load().fp8watch_magnitude(x.data_ptr(), x.numel(), dtype)
            return float(struct.unpack("f", struct.pack("i", bits))[0])
        except Unavailable:  # no compiler here
            pass
    low, high = (float(end) for end in torch.aminmax(x))
    return max(abs(low), abs(high))  # of a tensor with NaN both ends are NaN


def look_into(x: torch.Tensor, address: int, call_order: int, *, energy: bool) -> bool:
    """Merge a look at an output into the slab row at `address`, as `fp8watch.sketch.slab.Slab.accumulate_probe`.

    Args:
        x: any shape, floating, not empty.
        address: of a row of ROW in memory.
        call_order: index of the call in the step.
        energy: measure Σ x² as well.

    Returns:
        False where nothing was done: an element is not finite, or the library does not read this tensor.
    """
    dtype = _known_dtype(x)
    if dtype is None:
        return False
    try:
        library = cpu_library.library or cpu_library.load()
        return not library.fp8watch_look(x.data_ptr(), x.numel(), dtype, energy, address, call_order)
    except Unavailable:
        return False


def rows_hold(
    x: torch.Tensor,
    read: torch.Tensor,
    scale_inv: torch.Tensor | None,
    tile: tuple[int, int],
    rows: slice,
    bound: tuple[float, float, float, float],
) -> bool:
    """Whether rows of what a GEMM reads of an operand lost no more than rounding takes.

    Args:
        x: [M, K] float32, bfloat16 or float16.
        read: [M, K] float32, what codes stand for; or the codes, float8.
        scale_inv: float32 [Mt, Kt] of codes; None of values.
        tile: rows × columns of the operand that share a scale.
        rows: start and step; to the end.
        bound: clips an element's magnitude (inf: nothing does); of an element so much may be lost, as a share; of a tiny
            one so much; rows below this magnitude are not judged, nor those with something that is not finite.

    Returns:
        False as well where it cannot be told: the library is not to be had or does not read these tensors.
    """
    dtype, format = DTYPES.get(x.dtype), {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}.get(read.dtype, -1)
    if dtype is None or not x.numel() or x.shape != read.shape or (format < 0) is not (read.dtype is torch.float32):
        return False
    tensors = (x, read) if scale_inv is None else (x, read, scale_inv)
    if any(type(t) not in _PLAIN or not t.is_cpu or t.layout is not torch.strided or t.is_neg() for t in tensors):
        return False
    if (scale_inv is None) is not (format < 0) or not all(t.is_contiguous() for t in tensors[1:]) or x.stride(1) != 1:
        return False
    (bm, bk), (M, K) = tile, x.shape
    if scale_inv is not None and (
        scale_inv.dtype is not torch.float32 or scale_inv.shape != (-(-M // bm), -(-K // bk))
    ):
        return False
    values, codes = (read.data_ptr(), None) if scale_inv is None else (None, read.data_ptr())
    try:
        return bool(
            cpu_library.load().fp8watch_rows_hold(
                x.data_ptr(), x.stride(0), dtype, M, K, rows.start, rows.step, values, codes,
                None if scale_inv is None else scale_inv.data_ptr(), bm, bk, max(format, 0), *bound,
            )
        )  # fmt: skip
    except Unavailable:
        return False


def product_holds(
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    signs: torch.Tensor,
    rows: slice,
    allowed: float,
) -> bool:
    """Whether rows of a GEMM's output are those of a·b + bias, as far as their products with signs tell.

    Args:
        output: [M, N] float32, bfloat16 or float16.
        a, b: [M, K] and [K, N] float32, row by row or column by column in memory.
        bias: float32 [N] or None.
        signs: float32 [N].
        rows: start and step; to the end.
        allowed: what may be off, as a share of what is right, over all of these rows.

    Returns:
        False as well where it cannot be told: something is not finite, all of it is 0, or the library is not to be had or
        does not read these tensors.
    """
    dtype, (M, N), K = DTYPES.get(output.dtype), output.shape, a.shape[1]
    given = (output, a, b, signs) if bias is None else (output, a, b, signs, bias)
    if dtype is None or any(type(t) not in _PLAIN or not t.is_cpu or t.is_neg() for t in given) or not K * N:
        return False
    if any(t.dtype is not torch.float32 for t in given[1:]) or any(t.layout is not torch.strided for t in given):
        return False
    if (
        output.stride(1) != 1
        or 1 not in a.stride()
        or 1 not in b.stride()
        or not all(t.is_contiguous() for t in given[3:])
    ):
        return False
    if max(M * K, K * N) >= THREADED_ELEMENTS and torch.get_num_threads() > 1:
        return False  # torch shares the work
    try:
        return bool(
            cpu_library.load().fp8watch_product_holds(
                output.data_ptr(), output.stride(0), dtype, a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(),
                None if bias is None else bias.data_ptr(), signs.data_ptr(), M, K, N, rows.start, rows.step, allowed,
            )
        )  # fmt: skip
    except Unavailable:
        return False


def hash_of(x: torch.Tensor) -> int | None:
    """The hash over every bit that `fp8watch.sketch.weight_hash` defines, read as two's complement.

    Args:
        x: any shape, on any device.

    Returns:
        None where the library is not loaded or does not read this tensor.
    """
    library = cpu_library.library
    if library is None or type(x) not in _PLAIN or x.layout is not torch.strided or not x.is_cpu:
        return None
    if not x.is_contiguous() or x.is_neg() or x.is_conj() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    found: int = library.fp8watch_hash(x.data_ptr(), x.numel(), x.element_size())
    return found


def _scale(given: torch.Tensor | None, x: torch.Tensor, job: QuantizeJob) -> torch.Tensor | None:
    if given is None:
        return None
    bm, bk = job.tile
    return check_scale(given, (-(-x.shape[0] // bm), -(-x.shape[1] // bk)), x).detach().contiguous()


def _scales(given: Scales | None, x: torch.Tensor, job: QuantizeJob) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rowwise, columnwise = given or (None, None)
    return _scale(rowwise, x, job), _scale(columnwise, x, job.transposed())


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The operand, checked, with its rows in one piece each; a copy where it is not so."""
    plain = type(x) in _PLAIN
    if not (plain and x.dtype in DTYPES and x.dim() == 2 and x.is_cpu and x.layout is torch.strided and x.numel()):
        check_operand(x)
        if not x.is_cpu:
            raise ValueError(f"x is on {x.device}: the cpu backend serves cpu tensors; use backend=None or move x")
    if DOUBLE_SUBNORMAL * 1.0 == 0.0:
        check_denormals(x)
    reference.keep_freed_memory()
    if not plain:
        x = x.detach()
        if type(x) is not torch.Tensor:  # a subclass may hold its values elsewhere: its own pointer is null
            x = torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
    if x.is_neg():
        x = x.detach().resolve_neg()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.detach().contiguous()


def _known_dtype(x: torch.Tensor) -> int | None:
    """The library's name of an output's dtype; None for what is better left to torch, and for what has no memory of its
    own: a subclass such as DTensor may answer data_ptr() with 0."""
    if type(x) not in _PLAIN or x.layout != torch.strided:
        return None
    alone = x.numel() < THREADED_ELEMENTS or torch.get_num_threads() == 1  # from there on torch shares the work
    return DTYPES.get(x.dtype) if alone and x.is_cpu and x.is_contiguous() and not x.is_neg() else None
