"""Delayed scaling, MX scaling and NVFP4 a second time, written from the text and not from the code: numpy and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from quantize import oracle


class Delayed:
    """One operand: amaxes of the passes so far in a plain list, the newest last."""

    def __init__(self, fmt: str, length: int = 1024, algo: str = "max", margin: int = 0) -> None:
        self.largest = np.float32(oracle.LARGEST[fmt] / 2.0**margin)
        self.length, self.algo = length, algo
        self.amaxes: list[np.float32] = []
        self.running = np.float32(0)
        self.scale = np.float32(1)

    def call(self, x: np.ndarray) -> None:
        """One quantisation of the running pass."""
        amax = np.abs(x).max()  # NaN where there is one
        self.running = np.float32(np.maximum(self.running, amax))

    def end_of_pass(self) -> None:
        """The next scale, from the running pass and those that are remembered beside it."""
        window = [*self.amaxes, self.running][-self.length :]
        amax = self.running if self.algo == "most_recent" else np.float32(np.max(window))
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                self.scale = np.minimum(self.largest / amax, np.finfo(np.float32).max)
        self.amaxes = window
        self.running = np.float32(0)


def e8m0_byte(amax: np.float32, fmt: str) -> int:
    """The shared exponent of a tile: the smallest power of two that is not below amax/FP8_MAX."""
    if np.isnan(amax):
        return 0xFF
    if np.isinf(amax):
        return 0xFE
    share = Fraction(float(np.float32(amax) * (np.float32(1) / np.float32(oracle.LARGEST[fmt]))))
    if share <= Fraction(2) ** -127:
        return 0
    exponent = oracle.floor_log2(share)
    return exponent + (share > Fraction(2) ** exponent) + 127


def mxfp8(x: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, E8M0 bytes and dequantised values of float32 [M, K], tiles along K, one tile after the other."""
    rows, columns = x.shape
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    exponents = np.zeros((rows, -(-columns // 32)), np.uint8)
    for i in range(rows):
        for j in range(exponents.shape[1]):
            part = np.s_[i, 32 * j : min(32 * j + 32, columns)]
            byte = e8m0_byte(np.abs(x[part]).max(), fmt)
            scale = np.float32(math.nan if byte == 0xFF else 1.0 if byte == 0 else 2.0 ** (127 - byte))
            scale_inv = np.float32(math.nan if byte == 0xFF else 2.0 ** (byte - 127))
            with np.errstate(all="ignore"):
                codes[part] = oracle.encode(x[part] * scale, fmt)
                values[part] = oracle.TABLES[fmt][codes[part]].astype(np.float32) * scale_inv
            exponents[i, j] = byte
    return codes, exponents, values


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(y: np.ndarray) -> np.ndarray:
    """The nearest number of E2M1, of two equally near the one with an even code; NaN and both zeros are +0."""
    size = np.minimum(np.abs(y.astype(np.float64)), 6)
    midpoints = (E2M1[:-1] + E2M1[1:]) / 2
    code = np.searchsorted(midpoints, size, side="left")
    code = np.where(np.isin(size, midpoints) & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(y), 0, code)
    return np.where(np.isnan(y) | (y == 0), 0.0, np.copysign(E2M1[code], y))


def nvfp4(x: np.ndarray, rows: int = 1) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Numbers, E4M3 scale of each block, amax of float32 [M, K], blocks of `rows` × 16, one after the other."""
    one, largest = np.float32(1), np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        amax = np.abs(x).max()
        encode = np.minimum(np.float32(2688) / amax, largest)
        encode = one if encode == 0 else encode
        numbers = np.zeros(x.shape)
        scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // 16)))
        for i, j in np.ndindex(scales.shape):
            part = np.s_[i * rows : (i + 1) * rows, j * 16 : (j + 1) * 16]
            wanted = np.abs(x[part]).max() * (encode * (one / np.float32(6)))
            scale = oracle.TABLES["E4M3"][oracle.encode(np.minimum(wanted, np.float32(448)), "E4M3")]
            multiplier = np.minimum(one / (np.float32(scale) * (one / encode)), largest)
            numbers[part], scales[i, j] = e2m1(x[part] * multiplier), scale
    return numbers, scales, amax


def nvfp4_values(x: np.ndarray, rows: int = 1) -> np.ndarray:
    """What NVFP4 stands for: float32 [M, K]."""
    numbers, scales, amax = nvfp4(x, rows)
    level = np.float32(1) if amax == 0 else amax / np.float32(2688)
    wide = scales.repeat(rows, 0)[: x.shape[0]].repeat(16, 1)[:, : x.shape[1]].astype(np.float32) * level
    return numbers.astype(np.float32) * wide
