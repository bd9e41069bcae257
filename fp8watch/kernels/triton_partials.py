"""The line of the workspace that a program leaves: its partial sketch, and how tiles and elements enter it.

Shapes:     tensors [tiles, tiles] of a program -> WORDS of int32     Thread: device

There are no atomic operations: each program has a line of its own, and `triton_fold` reads the lines in a fixed order,
so that the same operand gives the same record. The statistics have the meaning that
fp8watch.kernels.reference_stats gives them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8watch.kernels.triton_cast import INF_BITS, bits_of, float_of, largest, smallest, total

# In 32-bit words. Sums of energies come first: they are float64.
SUMS = tl.constexpr(0)  # float64: signal, noise, tile noise ratio, moment2, moment4, largest tile noise ratio, gain
FIRST = tl.constexpr(16)  # int64: index of the first non-finite element, row by row
COUNTS = tl.constexpr(18)  # int32: the thirteen below
EXTREMES = tl.constexpr(32)  # float32: three maxima, three minima, worst deviation from the scale invariant
AMAX_HIST = tl.constexpr(40)  # int32 [64]
DEPTH_HIST = tl.constexpr(104)  # int32 [32]
WORDS = tl.constexpr(136)

NONZERO, SATURATED, UNDERFLOW, NAN, INF = (tl.constexpr(i) for i in range(5))
ZERO_TILES, EPS_TILES, SENTINEL_TILES, OFF_SCALE_TILES = (tl.constexpr(i) for i in range(5, 9))
WORST_TILE, OFF_TILE, NOISE_TILE, NAN_SCALES = (tl.constexpr(i) for i in range(9, 13))

NOWHERE = tl.constexpr(0x7FFFFFFF)
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
FP32_SCALE_SLACK = tl.constexpr(4 * 2.0**-23)


@triton.jit
def judge(
    amax, scale, scale_inv, quotient, eps, mine,
    LARGEST_CODE: tl.constexpr, POWER_2: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """What is to be said of each tile: its TileFlag bits but for those of elements, whether its scale ratio counts, the
    ratio, and how far it is off-scale (0 where it is not)."""
    amax_bits = bits_of(amax)
    usable = (scale_inv > 0.0) & (bits_of(scale_inv) < INF_BITS)
    # quotient Inf: a zero tile, or the scale was clamped to the input type; 0: a sentinel tile
    included = mine & usable & (bits_of(quotient) < INF_BITS) & (quotient > 0.0) & (amax >= eps)
    ratio = tl.math.div_rn(amax * scale, tl.full(amax.shape, LARGEST_CODE, tl.float32))
    LOW: tl.constexpr = 0.5 if POWER_2 else 1.0
    if POWER_2:
        within = (ratio > 0.5) & (ratio <= 1.0)
    else:
        within = (ratio >= 1.0 - FP32_SCALE_SLACK) & (ratio <= 1.0 + FP32_SCALE_SLACK)
    off = mine & (usable == 0)
    if INVARIANT:
        off = off | (included & (within == 0))
    deviation = tl.maximum(ratio, tl.math.div_rn(tl.full(ratio.shape, LOW, tl.float32), ratio))
    deviation = tl.where(off, tl.where(usable, deviation, float("inf")), 0.0)
    flags = tl.where(amax_bits == INF_BITS, 4, 0) | tl.where(amax_bits == 0, 8, 0)
    flags = flags | tl.where((amax < eps) & (amax_bits != 0), 16, 0) | tl.where(off, 32, 0)
    return tl.where(mine, flags, 0), included, ratio, deviation


@triton.jit
def store_marks(marks_out, place, mine, nonzero, saturated, underflow, num_nan, num_inf, flags, BYTES: tl.constexpr):
    """Eight integers a tile, of one byte each or of two: counts of elements, TileFlag bits, and two that are 0."""
    flags = flags | (num_nan > 0).to(tl.int32) | ((num_inf > 0).to(tl.int32) << 1)
    flags = flags | ((saturated > 0).to(tl.int32) << 6) | ((underflow > 0).to(tl.int32) << 7)
    marks = marks_out.to(tl.pointer_type(tl.int64))
    if BYTES:
        word = nonzero | (saturated << 8) | (underflow << 16) | (num_nan << 24)
        rest = (num_inf | (flags << 8)).to(tl.int64) << 32
        tl.store(marks + place, (word.to(tl.int64) & 0xFFFFFFFF) | rest, mask=mine)
    else:
        word = (nonzero | (saturated << 16)).to(tl.int64) & 0xFFFFFFFF
        rest = (underflow | (num_nan << 16)).to(tl.int64) << 32
        tl.store(marks + place * 2, word | rest, mask=mine)
        tl.store(marks + place * 2 + 1, (num_inf | (flags << 16)).to(tl.int64), mask=mine)


@triton.jit
def amax_buckets(amax, mine, TILES: tl.constexpr):
    """How many tiles lie in each bucket of amax_hist: int32 [64]."""
    # floor(log2(amax / 1.75)) + 48: adding 2^21 carries into the exponent where the mantissa is 1.75 or more
    bits = bits_of(amax)
    bucket = tl.minimum(tl.maximum(((bits + (1 << 21)) >> 23) - 80, 1), 63)
    bucket = tl.reshape(tl.where(mine, tl.where(bits == 0, 0, bucket), -1), [TILES])
    return tl.sum((bucket[:, None] == tl.arange(0, 64)[None, :]).to(tl.int32), 0)


@triton.jit
def store_elements(line, nonzero, saturated, underflow, num_nan, num_inf, first):
    """Counts of elements by tile, and the index of the first that is not finite."""
    counts = line + COUNTS
    tl.store(counts + NONZERO, total(nonzero))
    tl.store(counts + SATURATED, total(saturated))
    tl.store(counts + UNDERFLOW, total(underflow))
    tl.store(counts + NAN, total(num_nan))
    tl.store(counts + INF, total(num_inf))
    tl.store((line + FIRST).to(tl.pointer_type(tl.int64)), first)


@triton.jit
def store_tiles(
    line, num_zero, num_eps, num_sentinel, num_off, num_nan_scales,
    amax_max, worst_at, amax_min, scale_inv_max, scale_inv_min, ratio_max, ratio_min, deviation, off_at, hist,
):  # fmt: skip
    """Counts and extremes of tiles, each [tiles, tiles] but for the histogram."""
    counts = line + COUNTS
    floats = (line + EXTREMES).to(tl.pointer_type(tl.float32))
    top = largest(amax_max)
    worst_deviation = largest(deviation)
    tl.store(counts + ZERO_TILES, total(num_zero))
    tl.store(counts + EPS_TILES, total(num_eps))
    tl.store(counts + SENTINEL_TILES, total(num_sentinel))
    tl.store(counts + OFF_SCALE_TILES, total(num_off))
    tl.store(counts + NAN_SCALES, total(num_nan_scales))
    tl.store(counts + WORST_TILE, smallest(tl.where(amax_max == top, worst_at, NOWHERE)))
    tl.store(counts + OFF_TILE, smallest(tl.where(deviation == worst_deviation, off_at, NOWHERE)))
    tl.store(floats, top)
    tl.store(floats + 1, largest(scale_inv_max))
    tl.store(floats + 2, largest(ratio_max))
    tl.store(floats + 3, smallest(amax_min))
    tl.store(floats + 4, smallest(scale_inv_min))
    tl.store(floats + 5, smallest(ratio_min))
    tl.store(floats + 6, worst_deviation)
    tl.store(line + AMAX_HIST + tl.arange(0, 64), hist)


@triton.jit
def unit_of(finite_amax_bits):
    """2^−e for a finite amax of m·2^e, kept between 2^−126 and 2^127: in these units squares and fourth powers stay
    inside float32, and multiplying by them is exact."""
    return float_of(tl.minimum(tl.maximum(254 - (finite_amax_bits >> 23), 1), 254) << 23)


@triton.jit
def depth_buckets(scaled, wide_amax, countable, N: tl.constexpr):
    """How many elements lie how many octaves below the amax of their tile: int32 [32].

    For two positive numbers the difference of their bits is the floor of the logarithm of their quotient. What does not
    count is 0, lies in the last bucket, and is taken out of it.
    """
    depth = tl.minimum((bits_of(wide_amax) - bits_of(scaled)) >> 23, 31)
    hist = tl.histogram(tl.reshape(depth, [N]), 32)
    return hist - tl.where(tl.arange(0, 32) == 31, N - total(countable.to(tl.int32)), 0)


@triton.jit
def energies_of(signal, noise, fourth, shortfall, unit, scaled_amax):
    """float64 terms of tiles from sums in units: signal, noise, their ratio, second and fourth moment of x/amax, gain."""
    signal = signal.to(tl.float64)
    noise = noise.to(tl.float64)
    some = signal > 0.0
    per_unit = 1.0 / (unit.to(tl.float64) * unit.to(tl.float64))
    per_amax = 1.0 / (scaled_amax.to(tl.float64) * scaled_amax.to(tl.float64))
    ratio = tl.where(some, noise / tl.where(some, signal, 1.0), 0.0)
    moment2 = tl.where(some, signal * per_amax, 0.0)
    moment4 = tl.where(some, fourth.to(tl.float64) * per_amax * per_amax, 0.0)
    return signal * per_unit, noise * per_unit, ratio, moment2, moment4, -shortfall.to(tl.float64) * per_unit


@triton.jit
def store_energies(line, signal, noise, ratio, moment2, moment4, gain, worst_ratio, worst_at, depth_hist):
    """Sums of the terms, each [tiles, tiles] but for the histogram, and the tile of the largest ratio."""
    sums = (line + SUMS).to(tl.pointer_type(tl.float64))
    worst = largest(worst_ratio)
    tl.store(sums, total(signal))
    tl.store(sums + 1, total(noise))
    tl.store(sums + 2, total(ratio))
    tl.store(sums + 3, total(moment2))
    tl.store(sums + 4, total(moment4))
    tl.store(sums + 5, worst)
    tl.store(sums + 6, total(gain))
    tl.store(line + COUNTS + NOISE_TILE, smallest(tl.where(worst_ratio == worst, worst_at, NOWHERE)))
    tl.store(line + DEPTH_HIST + tl.arange(0, 32), depth_hist)
