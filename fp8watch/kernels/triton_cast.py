"""Casting to FP8 inside a Triton kernel, by integer arithmetic: the same bits on every device and in the interpreter.

Shapes:     any; elementwise, and reductions over the tiles of a region     Thread: device

Legend: a region is the [BM, BK] part of an operand that one program reads; it holds GM × GK tiles of TM × TK.

The interpreter casts to E4M3 wrongly, and the hardware's cast exists from sm_89 on; integer arithmetic serves both.
`HARDWARE` switches to the cast instruction: to be compared with this one on a GPU before it is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def bits_of(v):
    """The bits of a float32, as int32."""
    return v.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(y, sign, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """Round magnitudes to the format, to nearest, ties to even, saturating.

    Args:
        y: float32, 0 or more (Inf too), or NaN.
        sign: int32, 0x80 or 0.

    Returns:
        The codes (int32, 0 … 0xFF; of NaN there is one, 0x7F) and the magnitude of their values (float32).
    """
    SHIFT: tl.constexpr = 20 if E4M3 else 21
    REBIAS: tl.constexpr = (120 << 3) if E4M3 else (112 << 2)
    LARGEST_BITS: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # 448, 57344
    MIN_NORMAL_BITS: tl.constexpr = 0x3C800000 if E4M3 else 0x38800000  # 2^-6, 2^-14
    LIFT_BITS: tl.constexpr = 0x46800000 if E4M3 else 0x43000000  # 2^14, 2^7: their ulp is the smallest subnormal
    bits = bits_of(y) & 0x7FFFFFFF
    nan = bits > INF_BITS
    bits = tl.minimum(bits, LARGEST_BITS)
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    code = (rounded >> SHIFT) - REBIAS
    value_bits = (rounded >> SHIFT) << SHIFT
    # below the smallest normal number the float32 adder rounds: the sum's last bit is the smallest subnormal
    lift = float_of(tl.full(bits.shape, LIFT_BITS, tl.int32))
    lifted = float_of(bits) + lift
    small = bits < MIN_NORMAL_BITS
    code = tl.where(small, bits_of(lifted) - LIFT_BITS, code)
    value_bits = tl.where(small, bits_of(lifted - lift), value_bits)
    if HARDWARE:
        signed = float_of(bits | (sign << 24))
        if E4M3:
            code = signed.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            code = signed.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = code | sign
    return tl.where(nan, 0x7F, code), float_of(tl.where(nan, NAN_BITS, value_bits))


@triton.jit
def scale_of(amax, eps, LARGEST_CODE: tl.constexpr, LARGEST_INPUT: tl.constexpr, POWER_2: tl.constexpr, GUARD: tl.constexpr):  # fmt: skip
    """The scale of tiles by their amax, and FP8_MAX / max(amax, eps) as it came out of the division (IEEE)."""
    amax = tl.maximum(amax, eps)
    quotient = tl.math.div_rn(tl.full(amax.shape, LARGEST_CODE, tl.float32), amax)
    scale = quotient
    if GUARD:
        scale = tl.where(bits_of(quotient) == INF_BITS, LARGEST_INPUT, quotient)
        scale = tl.where((bits_of(amax) == 0) | (bits_of(amax) == INF_BITS), 1.0, scale)
    if POWER_2:
        scale = float_of(bits_of(scale) & INF_BITS)
    return scale, quotient


@triton.jit
def tile_max(v, GM: tl.constexpr, TM: tl.constexpr, GK: tl.constexpr, TK: tl.constexpr):
    """Largest of each tile: [BM, BK] -> [GM, GK]. For integers: floats are compared by their bits."""
    if TM == 1:
        return tl.max(tl.reshape(v, [GM, GK, TK]), 2)
    elif TK == 1:
        return tl.max(tl.reshape(v, [GM, TM, GK]), 1)
    else:
        return tl.max(tl.max(tl.reshape(v, [GM, TM, GK, TK]), 3), 1)


@triton.jit
def tile_sum(v, GM: tl.constexpr, TM: tl.constexpr, GK: tl.constexpr, TK: tl.constexpr):
    """Sum of each tile: [BM, BK] -> [GM, GK]."""
    if TM == 1:
        return tl.sum(tl.reshape(v, [GM, GK, TK]), 2)
    elif TK == 1:
        return tl.sum(tl.reshape(v, [GM, TM, GK]), 1)
    else:
        return tl.sum(tl.sum(tl.reshape(v, [GM, TM, GK, TK]), 3), 1)


@triton.jit
def spread(t, GM: tl.constexpr, TM: tl.constexpr, GK: tl.constexpr, TK: tl.constexpr):
    """One value a tile, for each of its elements: [GM, GK] -> [BM, BK]."""
    wide = tl.broadcast_to(t[:, None, :, None], [GM, TM, GK, TK])
    return tl.reshape(wide, [GM * TM, GK * TK])


@triton.jit
def largest(v):
    """The largest of a 2-D tensor."""
    return tl.max(tl.max(v, 1), 0)


@triton.jit
def smallest(v):
    """The smallest of a 2-D tensor."""
    return tl.min(tl.min(v, 1), 0)


@triton.jit
def total(v):
    """The sum of a 2-D tensor."""
    return tl.sum(tl.sum(v, 1), 0)
