"""MX scaling: 1×32 tiles with a shared exponent (E8M0), emulated with the arithmetic of the backends.

Shapes:     x [M, K] -> codes [M, K], scale_inv float8_e8m0fnu [M, ceil(K/32)]     Thread: training

Sources: OCP Microscaling Formats v1.0, and Transformer Engine's MXFP8 quantiser (`float_to_e8m0`, `exp2f_rcp` in
common/util/ptx.cuh). scale_inv = amax/FP8_MAX rounded **up** to a power of two, so nothing finite ever saturates.

    amax            byte of scale_inv    the tile becomes
    0               0x00 (2^-127)        zeros; encoded with scale 1, as Transformer Engine does
    ≤ FP8_MAX·2^-127  0x00 (2^-127)      zeros, for the same reason: what is not 0 underflows
    Inf             0xFE (2^127)         ±Inf where it was (448·2^127 overflows float32), 0 elsewhere
    NaN inside      0xFF (NaN)           NaN as a whole: the shared exponent is NaN (Transformer Engine's kernels ignore it)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import resolve
from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.operand_checks import check_denormals, check_operand
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.numerics.tile_stats import TileStats

TILE = 32
E8M0_NAN = 0xFF
_LARGEST_BYTE = 0xFE
_MANTISSA = 0x7FFFFF
_HALF = 0x400000  # 2^-127 as a subnormal float32: up to here the byte is 0


@dataclass(frozen=True)
class MxQuantized:
    """A tensor in FP8 with an E8M0 scale each 32 elements."""

    data: torch.Tensor  # torch.float8_*: [M, K]
    scale_inv: torch.Tensor  # torch.float8_e8m0fnu [M, ceil(K/32)], or [ceil(M/32), K] columnwise
    stats: TileStats
    columnwise: bool
    format: Fp8Format
    backend: str
    _dequantizer: Backend

    def dequantize(self) -> torch.Tensor:
        """Return what the codes stand for: float32 [M, K]."""
        tile = (TILE, 1) if self.columnwise else (1, TILE)
        scale_inv = e8m0_value(self.scale_inv.view(torch.uint8))
        return self._dequantizer.dequantize(self.data, scale_inv, tile)


def quantize_mxfp8(
    x: torch.Tensor, fp8_format: str = "E4M3", columnwise: bool = False, backend: str | None = None
) -> MxQuantized:
    """Quantise a tensor as MXFP8, and measure it.

    Args:
        x: [M, K] float32, bfloat16 or float16; any strides. Not differentiated.
        fp8_format: "E4M3" or "E5M2".
        columnwise: tiles run along the rows, 32×1, for a GEMM that contracts over M.
        backend: a name of `fp8watch.kernels.BACKEND_NAMES`, or None for the fastest that can serve x's device.

    Returns:
        Codes, E8M0 scales, statistics per tile, and `dequantize()`.

    Raises:
        TypeError: x is not a tensor of one of the three dtypes.
        ValueError: x is not 2-D or is empty or on device meta, or the format or backend is unknown.
        RuntimeError: subnormal numbers are flushed to zero in this thread (CPU).
    """
    check_operand(x)
    check_denormals(x)
    job = quantize_jobs((TILE, 1) if columnwise else (1, TILE), fp8_format)[-1]
    chosen = resolve(backend, x.device)
    codes = e8m0_scale_inv(mx_amax(x, columnwise), job.fmt)
    data, _, stats = chosen.quantize(x, job, e8m0_scale(codes))
    assert stats is not None
    return MxQuantized(data, codes.view(torch.float8_e8m0fnu), stats, columnwise, job.fmt, chosen.NAME, chosen)


def mx_amax(x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Return the largest magnitude of each tile, NaN where the tile holds one: float32 [M, ceil(K/32)].

    Columnwise: [ceil(M/32), K].
    """
    magnitude = x.detach().abs()
    axis = 0 if columnwise else 1
    length = magnitude.shape[axis]
    spare = -length % TILE
    if spare:
        magnitude = F.pad(magnitude, (0, 0, 0, spare) if columnwise else (0, spare))
    m, k = magnitude.shape
    tiled = magnitude.reshape(m // TILE, TILE, k) if columnwise else magnitude.reshape(m, k // TILE, TILE)
    return tiled.amax(1 if columnwise else 2).to(torch.float32)


def e8m0_scale_inv(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return the shared exponents: uint8, amax/FP8_MAX rounded up to a power of two, exponent + 127.

    Args:
        amax: float32, 0 or more, Inf or NaN.
        fmt: E4M3 or E5M2.
    """
    # the product with a float32 reciprocal, as the kernels do: both formats' largest numbers are 1.75·2^k, for which
    # it rounds up exactly where the quotient is above a power of two
    share = amax * (1.0 / torch.full_like(amax, fmt.max_finite))
    bits = share.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= _HALF))
    byte = (exponent + up).clamp_(max=_LARGEST_BYTE)
    return byte.masked_fill_(amax.isnan(), E8M0_NAN).to(torch.uint8)


def e8m0_value(byte: torch.Tensor) -> torch.Tensor:
    """Return what E8M0 bytes stand for: float32, 2^(byte − 127), NaN for 0xFF."""
    bits = byte.to(torch.int32)
    value = (bits << 23).masked_fill_(bits == 0, _HALF)  # 2^-127 is subnormal in float32
    return value.view(torch.float32).masked_fill_(bits == E8M0_NAN, float("nan"))


def e8m0_scale(byte: torch.Tensor) -> torch.Tensor:
    """Return what multiplies before the cast: float32 2^(127 − byte), 1 for byte 0, NaN for 0xFF."""
    bits = byte.to(torch.int32)
    value = ((254 - bits) << 23).masked_fill_(bits == _LARGEST_BYTE, _HALF)
    scale = value.view(torch.float32).masked_fill_(bits == E8M0_NAN, float("nan"))
    return scale.masked_fill_(bits == 0, 1.0)
