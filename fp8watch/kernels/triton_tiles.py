"""The kernels that read an operand: quantise, dequantise at once, and measure, one region a program.

Shapes:     x [M, K] -> codes or values [M, K], scale_inv and amax [Mt, Kt], partial sketch [programs, WORDS]
Thread:     device

A program reads its region in strips of a few rows, so that what it works on stays in registers. Tiles along a row are
done strip by strip. Tiles of many rows are read twice: for their amax, and again, from the cache, to be quantised. What
lies beyond the operand's edges is masked, and a 0 enters no statistic.

Legend: M × K elements, Mt × Kt tiles of TM × TK; a region is [BM, BK], a strip [SUB, BK]. With WHOLE the operand is one
tile, and its amax is given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8watch.kernels.triton_cast import (
    INF_BITS,
    bits_of,
    float_of,
    largest,
    scale_of,
    smallest,
    spread,
    tile_max,
    tile_sum,
)
from fp8watch.kernels.triton_partials import (
    NEVER,
    NOWHERE,
    WORDS,
    amax_buckets,
    depth_buckets,
    energies_of,
    judge,
    store_elements,
    store_energies,
    store_marks,
    store_tiles,
    unit_of,
)
from fp8watch.kernels.triton_strip import load_strip, quantize_strip, squares_of


@triton.jit
def _along_rows(
    x, pid, row0, col0, out, scale_inv_out, amax_out, marks_out, given, workspace,
    M, K, stride_m, stride_k, stride_om, stride_ok, Kt, eps,
    BM: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr, TK: tl.constexpr, E4M3: tl.constexpr,
    LARGEST_INPUT: tl.constexpr, POWER_2: tl.constexpr, GUARD: tl.constexpr, GIVEN: tl.constexpr,
    INVARIANT: tl.constexpr, STATS: tl.constexpr, HEAVY: tl.constexpr, OUTPUT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tiles 1 × TK of a region."""
    GK: tl.constexpr = BK // TK
    CLIPS: tl.constexpr = GIVEN or not GUARD
    LARGEST_CODE: tl.constexpr = 448.0 if E4M3 else 57344.0
    MIDPOINT_BITS: tl.constexpr = 0x43E80000 if E4M3 else 0x47700000  # 464, 61440
    cols = col0 + tl.arange(0, BK)
    tile_cols = col0 // TK + tl.arange(0, GK)
    none = tl.zeros([SUB, GK], tl.int32)
    nothing = tl.zeros([SUB, GK], tl.float32)
    num_nonzero, num_saturated, num_underflow, num_nan, num_inf = none, none, none, none, none
    num_zero, num_eps, num_sentinel, num_off, num_nan_scales = none, none, none, none, none
    first = tl.full([], NEVER, tl.int64)
    amax_max, worst_at = nothing - 1.0, none + NOWHERE
    amax_min, scale_inv_min, ratio_min = nothing + float("inf"), nothing + float("inf"), nothing + float("inf")
    scale_inv_max, ratio_max = nothing - float("inf"), nothing
    off_max, off_at = nothing - 1.0, none + NOWHERE
    amax_hist = tl.zeros([64], tl.int32)
    depth_hist = tl.zeros([32], tl.int32)
    zero64 = tl.zeros([SUB, GK], tl.float64)
    s_signal, s_noise, s_ratio, s_moment2, s_moment4, s_gain = zero64, zero64, zero64, zero64, zero64, zero64
    noise_max, noise_at = zero64 - 1.0, none + NOWHERE
    for strip in range(BM // SUB):
        rows = row0 + strip * SUB + tl.arange(0, SUB)
        value = load_strip(x, rows, cols, M, K, stride_m, stride_k)
        mag = bits_of(value) & 0x7FFFFFFF
        mine = (rows < M)[:, None] & (tile_cols < Kt)[None, :]
        place = rows[:, None] * Kt + tile_cols[None, :]
        top = tile_max(mag, SUB, 1, GK, TK)
        tile_nan = none
        tile_inf = none
        saturated = none
        finite_top = top
        if largest(top) >= INF_BITS:  # rare: the branch keeps healthy operands cheap
            top = tile_max(tl.where(mag > INF_BITS, 0, mag), SUB, 1, GK, TK)
            finite_top = tile_max(tl.where(mag >= INF_BITS, 0, mag), SUB, 1, GK, TK)
            tile_nan = tile_sum((mag > INF_BITS).to(tl.int32), SUB, 1, GK, TK)
            tile_inf = tile_sum((mag == INF_BITS).to(tl.int32), SUB, 1, GK, TK)
            # where the scale is forced to 1, what is large clips
            clips = ((mag >= MIDPOINT_BITS) & (mag < INF_BITS)).to(tl.int32)
            saturated = tl.where(top == INF_BITS, tile_sum(clips, SUB, 1, GK, TK), 0)
            index = rows.to(tl.int64)[:, None] * K + cols.to(tl.int64)[None, :]
            first = tl.minimum(first, smallest(tl.where(mag >= INF_BITS, index, NEVER)))
        amax = float_of(top)
        scale, quotient = scale_of(amax, eps, LARGEST_CODE, LARGEST_INPUT, POWER_2, GUARD)
        if GIVEN:
            scale = tl.load(given + place, mask=mine, other=1.0)
        scale_inv = tl.math.div_rn(tl.full([SUB, GK], 1.0, tl.float32), scale)
        tl.store(scale_inv_out + place, scale_inv, mask=mine)
        seen, clips, error = quantize_strip(
            value, scale, scale_inv, out, rows, cols, M, K, stride_om, stride_ok,
            SUB, BK, 1, TK, E4M3, CLIPS, HEAVY, OUTPUT, HARDWARE,
        )  # fmt: skip
        if STATS:
            seen = tile_sum(seen, SUB, 1, GK, TK)
            if CLIPS:
                saturated = tile_sum(clips, SUB, 1, GK, TK)
            flags, included, ratio, deviation = judge(
                amax, scale, scale_inv, quotient, eps, mine, LARGEST_CODE, POWER_2, INVARIANT
            )
            tl.store(amax_out + place, amax, mask=mine)
            store_marks(
                marks_out, place, mine, seen & 0xFFFF, saturated, seen >> 16, tile_nan, tile_inf, flags, TK < 256
            )
            num_nonzero += seen & 0xFFFF
            num_underflow += seen >> 16
            num_saturated += saturated
            num_nan += tile_nan
            num_inf += tile_inf
            num_sentinel += (flags >> 2) & 1
            num_zero += (flags >> 3) & 1
            num_eps += (flags >> 4) & 1
            num_off += (flags >> 5) & 1
            known = mine & (scale_inv == scale_inv)
            num_nan_scales += (mine & (scale_inv != scale_inv)).to(tl.int32)
            # places only grow from strip to strip: of two equals the earlier stays
            worse = mine & (amax > amax_max)
            worst_at = tl.where(worse, place, worst_at)
            amax_max = tl.where(worse, amax, amax_max)
            amax_min = tl.where(mine & (amax > 0.0), tl.minimum(amax, amax_min), amax_min)
            scale_inv_max = tl.where(known, tl.maximum(scale_inv, scale_inv_max), scale_inv_max)
            scale_inv_min = tl.where(known, tl.minimum(scale_inv, scale_inv_min), scale_inv_min)
            ratio_max = tl.where(included, tl.maximum(ratio, ratio_max), ratio_max)
            ratio_min = tl.where(included, tl.minimum(ratio, ratio_min), ratio_min)
            worse = mine & (deviation > off_max)
            off_at = tl.where(worse, place, off_at)
            off_max = tl.where(worse, deviation, off_max)
            amax_hist += amax_buckets(amax, mine, SUB * GK)
        if STATS and HEAVY:
            unit = unit_of(finite_top)
            scaled_amax = tl.where(top == 0, float("inf"), amax * unit)
            scaled, noise, lost = squares_of(value, error, unit, SUB, BK, 1, TK, CLIPS)
            wide_amax = spread(scaled_amax, SUB, 1, GK, TK)
            countable = (mag != 0) & (mag < INF_BITS) & (bits_of(wide_amax) < INF_BITS)
            depth_hist += depth_buckets(scaled, wide_amax, countable, SUB * BK)
            square = scaled * scaled
            signal, noise, ratio, moment2, moment4, gain = energies_of(
                tile_sum(square, SUB, 1, GK, TK), tile_sum(noise, SUB, 1, GK, TK),
                tile_sum(square * square, SUB, 1, GK, TK), tile_sum(lost, SUB, 1, GK, TK), unit, scaled_amax,
            )  # fmt: skip
            s_signal += signal
            s_noise += noise
            s_ratio += ratio
            s_moment2 += moment2
            s_moment4 += moment4
            s_gain += gain
            worse = mine & (ratio > noise_max)
            noise_at = tl.where(worse, place, noise_at)
            noise_max = tl.where(worse, ratio, noise_max)
    if STATS:
        line = workspace + pid.to(tl.int64) * WORDS
        store_elements(line, num_nonzero, num_saturated, num_underflow, num_nan, num_inf, first)
        store_tiles(
            line, num_zero, num_eps, num_sentinel, num_off, num_nan_scales, tl.maximum(amax_max, 0.0), worst_at,
            amax_min, scale_inv_max, scale_inv_min, ratio_max, ratio_min, tl.maximum(off_max, 0.0), off_at, amax_hist,
        )  # fmt: skip
        if HEAVY:
            store_energies(
                line, s_signal, s_noise, s_ratio, s_moment2, s_moment4, s_gain, tl.maximum(noise_max, 0.0), noise_at,
                depth_hist,
            )  # fmt: skip


@triton.jit
def _across_rows(
    x, pid, row0, col0, out, scale_inv_out, amax_out, marks_out, given, workspace, amax_in,
    M, K, stride_m, stride_k, stride_om, stride_ok, Mt, Kt, eps,
    BM: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr, TK: tl.constexpr, WHOLE: tl.constexpr, E4M3: tl.constexpr,
    LARGEST_INPUT: tl.constexpr, POWER_2: tl.constexpr, GUARD: tl.constexpr, GIVEN: tl.constexpr,
    INVARIANT: tl.constexpr, STATS: tl.constexpr, HEAVY: tl.constexpr, OUTPUT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tiles BM × TK of a region, or with WHOLE its part of the one tile (TK = BK)."""
    GK: tl.constexpr = BK // TK
    CLIPS: tl.constexpr = GIVEN or not GUARD
    LARGEST_CODE: tl.constexpr = 448.0 if E4M3 else 57344.0
    MIDPOINT_BITS: tl.constexpr = 0x43E80000 if E4M3 else 0x47700000  # 464, 61440
    cols = col0 + tl.arange(0, BK)
    top = tl.zeros([SUB, BK], tl.int32)
    for strip in range(BM // SUB):
        rows = row0 + strip * SUB + tl.arange(0, SUB)
        top = tl.maximum(top, bits_of(load_strip(x, rows, cols, M, K, stride_m, stride_k)) & 0x7FFFFFFF)
    top = tile_max(top, 1, SUB, GK, TK)
    tile_nan = tl.zeros([1, GK], tl.int32)
    tile_inf = tl.zeros([1, GK], tl.int32)
    large = tl.zeros([1, GK], tl.int32)
    first = tl.full([], NEVER, tl.int64)
    finite_top = top
    any_top = largest(top)
    if WHOLE:
        any_top = tl.maximum(any_top, bits_of(tl.load(amax_in)))
    if any_top >= INF_BITS:  # rare: looked at again
        top = tl.zeros([1, GK], tl.int32)
        finite_top = tl.zeros([1, GK], tl.int32)
        for strip in range(BM // SUB):
            rows = row0 + strip * SUB + tl.arange(0, SUB)
            mag = bits_of(load_strip(x, rows, cols, M, K, stride_m, stride_k)) & 0x7FFFFFFF
            top = tl.maximum(top, tile_max(tl.where(mag > INF_BITS, 0, mag), 1, SUB, GK, TK))
            finite_top = tl.maximum(finite_top, tile_max(tl.where(mag >= INF_BITS, 0, mag), 1, SUB, GK, TK))
            tile_nan += tile_sum((mag > INF_BITS).to(tl.int32), 1, SUB, GK, TK)
            tile_inf += tile_sum((mag == INF_BITS).to(tl.int32), 1, SUB, GK, TK)
            large += tile_sum(((mag >= MIDPOINT_BITS) & (mag < INF_BITS)).to(tl.int32), 1, SUB, GK, TK)
            index = rows.to(tl.int64)[:, None] * K + cols.to(tl.int64)[None, :]
            first = tl.minimum(first, smallest(tl.where(mag >= INF_BITS, index, NEVER)))
    tiles = tl.arange(0, GK)
    if WHOLE:
        place = tl.zeros([1, GK], tl.int32)
        mine = (place == 0) & (pid == 0)
        top = bits_of(tl.load(amax_in + place))
        finite_top = bits_of(tl.load(amax_in + 1 + place))
    else:
        mine = (col0 // TK + tiles < Kt)[None, :]
        place = row0 // BM * Kt + col0 // TK + tiles[None, :]
    amax = float_of(top)
    scale, quotient = scale_of(amax, eps, LARGEST_CODE, LARGEST_INPUT, POWER_2, GUARD)
    if GIVEN:
        scale = tl.load(given + place, mask=mine | WHOLE, other=1.0)
    scale_inv = tl.math.div_rn(tl.full([1, GK], 1.0, tl.float32), scale)
    tl.store(scale_inv_out + place, scale_inv, mask=mine)

    unit = unit_of(finite_top)
    scaled_amax = tl.where(top == 0, float("inf"), amax * unit)
    seen = tl.zeros([SUB, BK], tl.int32)
    clips = tl.zeros([SUB, BK], tl.int32)
    signal = tl.zeros([SUB, BK], tl.float32)
    fourth = tl.zeros([SUB, BK], tl.float32)
    noise = tl.zeros([SUB, BK], tl.float64 if CLIPS else tl.float32)
    lost = tl.zeros([SUB, BK], tl.float64 if CLIPS else tl.float32)
    depth_hist = tl.zeros([32], tl.int32)
    for strip in range(BM // SUB):
        rows = row0 + strip * SUB + tl.arange(0, SUB)
        value = load_strip(x, rows, cols, M, K, stride_m, stride_k)
        strip_seen, strip_clips, error = quantize_strip(
            value, scale, scale_inv, out, rows, cols, M, K, stride_om, stride_ok,
            SUB, BK, SUB, TK, E4M3, CLIPS, HEAVY, OUTPUT, HARDWARE,
        )  # fmt: skip
        if STATS:
            seen += strip_seen
            if CLIPS:
                clips += strip_clips
        if STATS and HEAVY:
            scaled, strip_noise, strip_lost = squares_of(value, error, unit, SUB, BK, SUB, TK, CLIPS)
            wide_amax = spread(scaled_amax, 1, SUB, GK, TK)
            mag = bits_of(value) & 0x7FFFFFFF
            countable = (mag != 0) & (mag < INF_BITS) & (bits_of(wide_amax) < INF_BITS)
            depth_hist += depth_buckets(scaled, wide_amax, countable, SUB * BK)
            square = scaled * scaled
            signal += square
            fourth += square * square
            noise += strip_noise
            lost += strip_lost
    if STATS:
        line = workspace + pid.to(tl.int64) * WORDS
        seen = tile_sum(seen, 1, SUB, GK, TK)
        saturated = tl.where(top == INF_BITS, large, 0)  # where the scale is forced to 1, what is large clips
        if CLIPS:
            saturated = tile_sum(clips, 1, SUB, GK, TK)
        flags, included, ratio, deviation = judge(
            amax, scale, scale_inv, quotient, eps, mine, LARGEST_CODE, POWER_2, INVARIANT
        )
        if not WHOLE:
            tl.store(amax_out + place, amax, mask=mine)
            store_marks(
                marks_out, place, mine, seen & 0xFFFF, saturated, seen >> 16, tile_nan, tile_inf, flags, BM * TK < 256
            )
        known = mine & (scale_inv == scale_inv)
        store_elements(line, seen & 0xFFFF, saturated, seen >> 16, tile_nan, tile_inf, first)
        store_tiles(
            line, (flags >> 3) & 1, (flags >> 4) & 1, (flags >> 2) & 1, (flags >> 5) & 1,
            (mine & (scale_inv != scale_inv)).to(tl.int32),
            tl.where(mine, amax, 0.0), tl.where(mine, place, NOWHERE), tl.where(mine & (amax > 0.0), amax, float("inf")),
            tl.where(known, scale_inv, -float("inf")), tl.where(known, scale_inv, float("inf")),
            tl.where(included, ratio, 0.0), tl.where(included, ratio, float("inf")),
            tl.where(mine, deviation, 0.0), tl.where(mine, place, NOWHERE), amax_buckets(amax, mine, GK),
        )  # fmt: skip
        if HEAVY:
            signals, noises, ratios, moment2, moment4, gains = energies_of(
                tile_sum(signal, 1, SUB, GK, TK), tile_sum(noise, 1, SUB, GK, TK), tile_sum(fourth, 1, SUB, GK, TK),
                tile_sum(lost, 1, SUB, GK, TK), unit, scaled_amax,
            )  # fmt: skip
            worst_at = tl.where(mine, place, NOWHERE)
            store_energies(line, signals, noises, ratios, moment2, moment4, gains, ratios, worst_at, depth_hist)


@triton.jit
def quantize_kernel(
    x, out, scale_inv_out, amax_out, marks_out, given, workspace, amax_in,
    M, K, stride_m, stride_k, stride_om, stride_ok, Mt, Kt, regions_k, eps,
    BM: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, WHOLE: tl.constexpr,
    E4M3: tl.constexpr, LARGEST_INPUT: tl.constexpr, POWER_2: tl.constexpr, GUARD: tl.constexpr, GIVEN: tl.constexpr,
    INVARIANT: tl.constexpr, STATS: tl.constexpr, HEAVY: tl.constexpr, OUTPUT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One direction: tiles along the rows, along the columns, blocks, or the whole operand as one tile."""
    pid = tl.program_id(0)
    row0 = pid // regions_k * BM
    col0 = pid % regions_k * BK
    if TM == 1 and not WHOLE:
        _along_rows(
            x, pid, row0, col0, out, scale_inv_out, amax_out, marks_out, given, workspace,
            M, K, stride_m, stride_k, stride_om, stride_ok, Kt, eps, BM, BK, SUB, TK,
            E4M3, LARGEST_INPUT, POWER_2, GUARD, GIVEN, INVARIANT, STATS, HEAVY, OUTPUT, HARDWARE,
        )  # fmt: skip
    else:
        _across_rows(
            x, pid, row0, col0, out, scale_inv_out, amax_out, marks_out, given, workspace, amax_in,
            M, K, stride_m, stride_k, stride_om, stride_ok, Mt, Kt, eps, BM, BK, SUB, TK, WHOLE,
            E4M3, LARGEST_INPUT, POWER_2, GUARD, GIVEN, INVARIANT, STATS, HEAVY, OUTPUT, HARDWARE,
        )  # fmt: skip


@triton.jit
def both_kernel(
    x,
    out, scale_inv_out, amax_out, marks_out, given, workspace,
    out_c, scale_inv_out_c, amax_out_c, marks_out_c, given_c, workspace_c,
    M, K, stride_m, stride_k, stride_om, stride_ok, stride_cm, stride_ck, Mt, Kt, regions_k, eps,
    BM: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr,
    E4M3: tl.constexpr, LARGEST_INPUT: tl.constexpr, POWER_2: tl.constexpr, GUARD: tl.constexpr, GIVEN: tl.constexpr,
    INVARIANT: tl.constexpr, STATS: tl.constexpr, HEAVY: tl.constexpr, OUTPUT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Tiles 1 × BM and BM × 1 from one read of memory: Mt counts those along a column, Kt those along a row."""
    pid = tl.program_id(0)
    row0 = pid // regions_k * BM
    col0 = pid % regions_k * BK
    _along_rows(
        x, pid, row0, col0, out, scale_inv_out, amax_out, marks_out, given, workspace,
        M, K, stride_m, stride_k, stride_om, stride_ok, Kt, eps, BM, BK, SUB, BM,
        E4M3, LARGEST_INPUT, POWER_2, GUARD, GIVEN, INVARIANT, STATS, HEAVY, OUTPUT, HARDWARE,
    )  # fmt: skip
    # the operand comes from the cache now
    _across_rows(
        x, pid, row0, col0, out_c, scale_inv_out_c, amax_out_c, marks_out_c, given_c, workspace_c, None,
        M, K, stride_m, stride_k, stride_cm, stride_ck, Mt, K, eps, BM, BK, SUB, 1, False,
        E4M3, LARGEST_INPUT, POWER_2, GUARD, GIVEN, INVARIANT, STATS, HEAVY, OUTPUT, HARDWARE,
    )  # fmt: skip
