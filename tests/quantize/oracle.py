"""The blockwise rule a second time, written from the text and not from the code: numpy, one tile after the other.

Codes are found by searching the table of the 256 values, statistics by looking at one element after the other with
exact fractions. Slow, and meant to be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

EXPONENT_BITS = {"E4M3": 4, "E5M2": 5}
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
CLIP_FROM = {"E4M3": Fraction(464), "E5M2": Fraction(61440)}
LARGEST_INPUT = {"float32": np.float32(3.4028234663852886e38), "bfloat16": np.float32(3.3895313892515355e38)}
LARGEST_INPUT["float16"] = np.float32(65504.0)


def code_value(code: int, fmt: str) -> float:
    """What one byte means."""
    exponent_bits = EXPONENT_BITS[fmt]
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (2**mantissa_bits - 1)
    if fmt == "E4M3" and code & 0x7F == 0x7F:
        return math.nan
    if fmt == "E5M2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


TABLES = {fmt: np.array([code_value(c, fmt) for c in range(256)], dtype=np.float64) for fmt in LARGEST}
NUM_FINITE = {"E4M3": 127, "E5M2": 124}  # codes 0 … n − 1 are the finite values from 0 up


def encode(products: np.ndarray, fmt: str) -> np.ndarray:
    """The code of each float32: saturated, then the nearest value, of two equally near the one with an even code."""
    values = TABLES[fmt][: NUM_FINITE[fmt]]
    midpoints = (values[:-1] + values[1:]) / 2
    y = np.minimum(np.abs(products.astype(np.float64)), LARGEST[fmt])
    codes = np.searchsorted(midpoints, y, side="left")  # midpoints below y
    tie = np.isin(y, midpoints)
    codes = np.where(tie & (codes % 2 == 1), codes + 1, codes)
    codes = codes | np.where(np.signbit(products), 0x80, 0)
    return np.where(np.isnan(products), 0x7F, codes).astype(np.uint8)


def tile_scale(amax: np.float32, fmt: str, power_2: bool, eps: float, dtype: str, guard: bool = True) -> np.float32:
    """Rules 2 to 5."""
    if amax < np.float32(eps):
        amax = np.float32(eps)
    if guard and (amax == 0 or np.isinf(amax)):
        return np.float32(1.0)
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(LARGEST[fmt]) / amax
    if guard and np.isinf(scale):
        scale = LARGEST_INPUT[dtype]
    if power_2 and np.isfinite(scale) and scale > 0:
        mantissa, exponent = math.frexp(float(scale))
        assert 0.5 <= mantissa < 1
        scale = np.float32(math.ldexp(0.5, exponent))
    return np.float32(scale)


def floor_log2(q: Fraction) -> int:
    """The exact floor of the binary logarithm."""
    guess = q.numerator.bit_length() - q.denominator.bit_length()
    while Fraction(2) ** guess > q:
        guess -= 1
    while Fraction(2) ** (guess + 1) <= q:
        guess += 1
    return guess


@dataclass
class Tile:
    """One tile: everything about it."""

    elements: np.ndarray  # float32, in row-major order
    amax: np.float32
    scale: np.float32
    scale_inv: np.float32
    codes: np.ndarray
    dequantized: np.ndarray
    first: tuple[int, int]  # row and column of its first element


@dataclass
class Result:
    codes: np.ndarray
    dequantized: np.ndarray
    scale_inv: np.ndarray
    amax: np.ndarray
    scale: np.ndarray
    tiles: dict[tuple[int, int], Tile] = field(default_factory=dict)


def quantize(
    x: np.ndarray,
    tile_shape: tuple[int, int],
    fmt: str,
    power_2: bool,
    eps: float,
    dtype: str = "float32",
    scale: np.ndarray | None = None,
    guard: bool = True,
) -> Result:
    """Quantise float32 [M, K] tile by tile; dtype is that of the operand before it was widened."""
    (rows, columns), (bm, bk) = x.shape, tile_shape
    mt, kt = -(-rows // bm), -(-columns // bk)
    out = Result(
        np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32), *(np.zeros((mt, kt), np.float32) for _ in "abc")
    )
    for i in range(mt):
        for j in range(kt):
            part = np.s_[i * bm : min((i + 1) * bm, rows), j * bk : min((j + 1) * bk, columns)]
            tile = x[part]
            numbers = np.abs(tile[~np.isnan(tile)])
            amax = np.float32(numbers.max()) if numbers.size else np.float32(0)
            s = tile_scale(amax, fmt, power_2, eps, dtype, guard) if scale is None else np.float32(scale[i, j])
            with np.errstate(all="ignore"):
                s_inv = np.float32(1) / s
                codes = encode(tile * s, fmt)
                dequantized = TABLES[fmt][codes].astype(np.float32) * s_inv
            out.codes[part], out.dequantized[part] = codes, dequantized
            out.scale_inv[i, j], out.amax[i, j], out.scale[i, j] = s_inv, amax, s
            out.tiles[i, j] = Tile(tile, amax, s, s_inv, codes, dequantized, (i * bm, j * bk))
    return out


def sketch(
    result: Result, fmt: str, power_2: bool, eps: float, dtype: str = "float32", bound: bool = True
) -> dict[str, Any]:
    """Every field of the record, counted one element after the other."""
    f: dict[str, Any] = dict.fromkeys(
        [
            "signal_energy",
            "noise_energy",
            "gain_energy",
            "tile_noise_ratio_sum",
            "moment2",
            "moment4",
            "tile_noise_ratio_max",
        ],
        0.0,
    )
    f.update(dict.fromkeys(["num_elements", "num_nonzero", "num_saturated", "num_underflow", "num_nan", "num_inf"], 0))
    f.update(num_tiles=0, num_zero_tiles=0, num_eps_tiles=0, num_sentinel_tiles=0, num_off_scale_tiles=0)
    f.update(depth_hist=[0] * 32, amax_hist=[0] * 64, amax_max=0.0, scale_inv_max=0.0, scale_ratio_max=0.0)
    f.update(amax_min_nonzero=math.inf, scale_inv_min=math.inf, scale_ratio_min=math.inf)
    f.update(worst_tile=(-1, -1), noise_tile=(-1, -1), off_scale_tile=(-1, -1), num_calls=1)
    f["noise_ratios"] = {}
    worst_deviation, nonfinite = 0.0, []
    for place, t in result.tiles.items():
        f["num_tiles"] += 1
        signal = noise = 0.0
        for index, x in np.ndenumerate(t.elements):
            f["num_elements"] += 1
            f["num_nonzero"] += int(x != 0)
            f["num_nan"] += int(np.isnan(x))
            f["num_inf"] += int(np.isinf(x))
            f["num_underflow"] += int(x != 0 and t.codes[index] & 0x7F == 0)
            if not np.isfinite(x):
                nonfinite.append((t.first[0] + index[0], t.first[1] + index[1]))
                continue
            with np.errstate(all="ignore"):
                product = np.abs(x) * t.scale
            f["num_saturated"] += int(product >= float(CLIP_FROM[fmt]))
            signal += float(x) ** 2
            if np.isfinite(t.dequantized[index]):
                noise += (float(x) - float(t.dequantized[index])) ** 2
                f["gain_energy"] += float(x) * (float(t.dequantized[index]) - float(x))
            if x != 0 and np.isfinite(t.amax):
                share = float(abs(x)) / float(t.amax)
                f["moment2"] += share**2
                f["moment4"] += share**4
                f["depth_hist"][min(floor_log2(Fraction(float(t.amax)) / abs(Fraction(float(x)))), 31)] += 1
        f["signal_energy"] += signal
        f["noise_energy"] += noise
        if signal > 0:
            f["tile_noise_ratio_sum"] += noise / signal
            f["noise_ratios"][place] = noise / signal
            if noise / signal > f["tile_noise_ratio_max"]:
                f["tile_noise_ratio_max"], f["noise_tile"] = noise / signal, place
        f["num_zero_tiles"] += int(t.amax == 0)
        f["num_eps_tiles"] += int(0 < t.amax < np.float32(eps))
        f["num_sentinel_tiles"] += int(np.isinf(t.amax))
        if t.amax == 0:
            bucket = 0
        elif np.isinf(t.amax):
            bucket = 63
        else:
            bucket = min(max(floor_log2(Fraction(float(t.amax)) * 4 / 7) + 48, 1), 63)
        f["amax_hist"][bucket] += 1
        if t.amax > f["amax_max"]:
            f["amax_max"], f["worst_tile"] = float(t.amax), place
        if t.amax > 0:
            f["amax_min_nonzero"] = min(f["amax_min_nonzero"], float(t.amax))
        f["scale_inv_max"] = float(np.maximum(f["scale_inv_max"], t.scale_inv))  # NaN stays NaN
        f["scale_inv_min"] = float(np.minimum(f["scale_inv_min"], t.scale_inv))
        deviation = _deviation(t, fmt, power_2, eps, f, bound)
        f["num_off_scale_tiles"] += int(deviation > 0)
        if deviation > worst_deviation:
            worst_deviation, f["off_scale_tile"] = deviation, place
    f["first_nonfinite"] = (*min(nonfinite), 0) if nonfinite else (-1, -1, -1)
    return f


def _deviation(t: Tile, fmt: str, power_2: bool, eps: float, f: dict[str, Any], bound: bool) -> float:
    """How far a tile is off-scale, 0 when it is not; notes the extremes of the ratio."""
    if not (np.isfinite(t.scale) and t.scale > 0 and np.isfinite(t.scale_inv) and t.scale_inv > 0):
        return math.inf
    with np.errstate(over="ignore", divide="ignore"):
        clamped = t.amax == 0 or np.isinf(np.float32(LARGEST[fmt]) / max(t.amax, np.float32(eps)))
        if clamped or np.isinf(t.amax) or t.amax < np.float32(eps):
            return 0.0
        ratio = float(t.amax * t.scale / np.float32(LARGEST[fmt]))
    f["scale_ratio_max"] = max(f["scale_ratio_max"], ratio)
    f["scale_ratio_min"] = min(f["scale_ratio_min"], ratio)
    if not bound:
        return 0.0
    healthy = 0.5 < ratio <= 1 if power_2 else abs(ratio - 1) <= 4 * 2.0**-23
    return 0.0 if healthy else max(ratio, (0.5 if power_2 else 1.0) / ratio if ratio else math.inf)
