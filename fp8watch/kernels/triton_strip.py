"""A strip of a region: read, quantised and written. What is done with each element, and nothing else.

Shapes:     strips [SUB, BK]     Thread: device
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8watch.kernels.triton_cast import INF_BITS, bits_of, encode, float_of, largest, spread


@triton.jit
def load_strip(x, rows, cols, M, K, stride_m, stride_k):
    """float32 [SUB, BK] of the operand; 0 beyond its edges."""
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    places = rows.to(tl.int64)[:, None] * stride_m + cols.to(tl.int64)[None, :] * stride_k
    value = tl.load(x + places, mask=inside, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:  # by its bits: the interpreter's conversion loses subnormal numbers
        return float_of(value.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return value.to(tl.float32)


@triton.jit
def quantize_strip(
    value, scale, scale_inv, out, rows, cols, M, K, stride_om, stride_ok,
    SUB: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr,
    E4M3: tl.constexpr, CLIPS: tl.constexpr, HEAVY: tl.constexpr, OUTPUT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write codes, values or nothing (OUTPUT 0, 1, 2); return the counts of non-zero and underflow of each element in one integer, whether it
    clips, and the error of each element (0 where there is none)."""
    xbits = bits_of(value)
    mag = xbits & 0x7FFFFFFF
    y = float_of(mag) * spread(scale, SUB // TM, TM, BK // TK, TK)
    code, rounded = encode(y, (xbits >> 24) & 0x80, E4M3, HARDWARE)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    places = rows.to(tl.int64)[:, None] * stride_om + cols.to(tl.int64)[None, :] * stride_ok
    if OUTPUT == 1 or HEAVY:
        signed = float_of(bits_of(rounded) | (xbits & -0x80000000))
        dequantized = signed * spread(scale_inv, SUB // TM, TM, BK // TK, TK)
    if OUTPUT == 1:
        tl.store(out + places, dequantized, mask=inside)
    elif OUTPUT == 0:
        tl.store(out + places, code.to(tl.uint8), mask=inside)
    seen = tl.where(mag != 0, tl.where((code & 0x7F) == 0, 0x10001, 1), 0)
    if CLIPS:  # a scale computed here clips nothing
        MIDPOINT: tl.constexpr = 464.0 if E4M3 else 61440.0
        clips = ((y >= MIDPOINT) & (mag < INF_BITS)).to(tl.int32)
    else:
        clips = seen
    if HEAVY:
        error = tl.where((mag < INF_BITS) & (tl.abs(dequantized) < float("inf")), value - dequantized, 0.0)
    else:
        error = value
    return seen, clips, error


@triton.jit
def squares_of(value, error, unit, SUB: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, CLIPS: tl.constexpr):  # fmt: skip
    """Magnitudes of elements, squares of errors and element times error, in units of their tile; 0 where an element is not
    finite."""
    wide_unit = spread(unit, SUB // TM, TM, BK // TK, TK)
    mag = bits_of(value) & 0x7FFFFFFF
    scaled = tl.where(mag < INF_BITS, float_of(mag), 0.0) * wide_unit
    if CLIPS:  # a given scale may be anything, and the error with it: float64 holds its square
        exact = error.to(tl.float64) * wide_unit.to(tl.float64)
        signed = float_of(bits_of(scaled) | (bits_of(value) & -0x80000000))
        return scaled, exact * exact, signed.to(tl.float64) * exact
    else:
        error = error * wide_unit
        signed = float_of(bits_of(scaled) | (bits_of(value) & -0x80000000))
        return scaled, error * error, signed * error


@triton.jit
def amax_kernel(
    x, extremes, M, K, stride_m, stride_k, regions_k, BM: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr
):
    """The bits of the largest magnitude of each region, NaN ignored, and of the largest finite one: int32 [P, 2]."""
    pid = tl.program_id(0)
    cols = pid % regions_k * BK + tl.arange(0, BK)
    top = tl.zeros([SUB, BK], tl.int32)
    finite_top = tl.zeros([SUB, BK], tl.int32)
    for strip in range(BM // SUB):
        rows = pid // regions_k * BM + strip * SUB + tl.arange(0, SUB)
        mag = bits_of(load_strip(x, rows, cols, M, K, stride_m, stride_k)) & 0x7FFFFFFF
        top = tl.maximum(top, tl.where(mag > INF_BITS, 0, mag))
        finite_top = tl.maximum(finite_top, tl.where(mag >= INF_BITS, 0, mag))
    tl.store(extremes + pid * 2, largest(top))
    tl.store(extremes + pid * 2 + 1, largest(finite_top))
