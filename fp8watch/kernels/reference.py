"""The reference backend: blockwise quantisation in plain torch, on any device. Short, and right.

Shapes:     x [M, K] -> codes [M, K], scale_inv [Mt, Kt], TileStats     Thread: training

Every other backend equals this one exactly: codes and scales with tolerance 0.
Source of the rule: Transformer Engine's Float8BlockScaling (compute_scale_from_amax and the kernels around it).
Legend: M rows, K columns, Mt × Kt tiles of bm × bk elements; a `_t` tensor is [Mt, bm, Kt, bk].
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fp8watch.kernels import reference_stats
from fp8watch.kernels.backend import Quantized
from fp8watch.kernels.reference_stats import Kind
from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.operand_checks import check_denormals, check_operand, check_scale, check_tile_shape
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import INF, TileStats

NAME = "reference"
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = {"E4M3": 3, "E5M2": 2, "E2M1": 1}
_SMALLEST_ORDINARY_AMAX = 2.0**-110  # every format's FP8_MAX over it is finite
_LARGEST_ORDINARY_AMAX = 2.0**127  # above it a code may stand for more than float32 can hold


def probe(device: torch.device) -> str | None:
    """The reference serves every device that holds values."""
    return "tensors on device meta have no values" if device.type == "meta" else None


class _Parts(NamedTuple):
    values_t: torch.Tensor  # float32, on the format's grid, before scale_inv
    scale_inv: torch.Tensor
    dequantized_t: torch.Tensor | None
    stats: TileStats | None


def quantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """Quantise a 2-D operand tile by tile.

    Args:
        x: [M, K] float32, bfloat16 or float16; any strides. Not differentiated.
        job: tile, format, scale rule, and what to measure.
        scale: float32 [Mt, Kt] to use in place of the computed one (a cached or delayed scale). The scale ratio is
            then that of this tensor's amax to the given scale.

    Returns:
        Codes [M, K] of the format's dtype, scale_inv float32 [Mt, Kt], and the statistics or None.

    Raises:
        TypeError, ValueError: x or scale is not as said above.
        RuntimeError: subnormal numbers are flushed to zero in this thread (CPU).
    """
    got = _quantize(x, job, scale, dequantized=False)
    return untiled(got.values_t.to(job.fmt.dtype), x), got.scale_inv, got.stats


def quantize_dequantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `quantize`, with the dequantised operand (float32 [M, K]) in place of the codes.

    Equal to `dequantize` of what `quantize` returns bit by bit; the codes themselves are never made, because the
    values are rounded to the format's grid in float32 anyway and the cast to FP8 and back would change nothing.
    """
    got = _quantize(x, job, scale, dequantized=True)
    assert got.dequantized_t is not None
    return untiled(got.dequantized_t, x), got.scale_inv, got.stats


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
    """Multiply codes by their tile's scale_inv.

    Args:
        data: [M, K] of an FP8 dtype.
        scale_inv: float32 [ceil(M/bm), ceil(K/bk)].
        tile_shape: (bm, bk).

    Returns:
        float32 [M, K].
    """
    bm, bk = check_tile_shape(tile_shape)
    num_tiles = (-(-data.shape[0] // bm), -(-data.shape[1] // bk))
    check_scale(scale_inv, num_tiles, data)
    check_denormals(data)
    return untiled(tiled(data.to(torch.float32), (bm, bk)) * spread(scale_inv), data)


def tile_scale(
    amax: torch.Tensor, job: QuantizeJob, dtype: torch.dtype, *, ordinary: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each tile, and FP8_MAX/amax as it came out of the division.

    Args:
        amax: float32, 0 or more, Inf where an element is.
        job: format, power_2_scale, eps and force_scale_1.
        dtype: of the operand; its largest finite value stands in for a scale that overflows.
        ordinary: the caller knows that no tile needs the guard or that stand-in.
    """
    if job.eps > 0:
        amax = amax.clamp_min(job.eps)
    # torch.div of two tensors: a Python number over a tensor is a reciprocal and a product, other codes
    quotient = torch.full_like(amax, job.fmt.max_finite).div_(amax)
    scale = quotient
    if job.force_scale_1 and not ordinary:
        scale = quotient.masked_fill(quotient == INF, torch.finfo(dtype).max)
        scale.masked_fill_((amax == 0).logical_or_(amax == INF), 1.0)
    if job.power_2_scale:
        scale = scale.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    return scale, quotient


def round_to_grid(y: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Round to the nearest value of the format, ties to even: float32 in, float32 out.

    Args:
        y: 0 … fmt.max_finite, or NaN.

    Adding 2^(e + 23 − mantissa bits) to a number of exponent e leaves exactly the format's mantissa bits in the
    float32 sum, rounded by the processor; below the smallest normal number the exponent stays where it is.
    """
    exponent = y.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32).clamp_min_(fmt.min_normal)
    lift = 2.0 ** (23 - _MANTISSA_BITS[fmt.name])
    return y.add(exponent, alpha=lift).sub_(exponent, alpha=lift)


def tiled(x: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
    """View [M, K] float32 as [Mt, bm, Kt, bk]; a copy, zero beyond the edges, where tiles are ragged."""
    (rows, columns), (bm, bk) = x.shape, tile_shape
    mt, kt = -(-rows // bm), -(-columns // bk)
    if mt * bm != rows or kt * bk != columns:
        x = F.pad(x, (0, kt * bk - columns, 0, mt * bm - rows))
    return x.contiguous().view(mt, bm, kt, bk)


def spread(per_tile: torch.Tensor) -> torch.Tensor:
    """View [Mt, Kt] so that it broadcasts over [Mt, bm, Kt, bk]."""
    return per_tile[:, None, :, None]


def untiled(values_t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Undo `tiled`: contiguous [M, K]."""
    mt, bm, kt, bk = values_t.shape
    return values_t.view(mt * bm, kt * bk)[: x.shape[0], : x.shape[1]].contiguous()


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let glibc keep freed buffers of up to 24 MiB instead of giving each back to the system.

    Its limit grows with the largest block ever freed, and starts at 128 KiB: until then every buffer of a small
    model is mapped, cleared and unmapped anew, which takes three times as long as what is computed in it. The block
    below is never touched, so it costs nothing. Where it does not help it does no harm.
    """
    torch.empty(24 << 20, dtype=torch.uint8, device="cpu")


def _look(amax: torch.Tensor, eps: float) -> Kind:
    """Tell what kind of operand this is. A CPU can be asked at once; another device would have to be waited for."""
    if not amax.is_cpu:
        return Kind.ANY
    low, high = (float(extreme) for extreme in amax.aminmax())
    if not high < _LARGEST_ORDINARY_AMAX:  # NaN too
        return Kind.ANY
    return Kind.ORDINARY if low > _SMALLEST_ORDINARY_AMAX and low > eps * (1 + 1e-6) else Kind.FINITE


def _quantize(x: torch.Tensor, job: QuantizeJob, given: torch.Tensor | None, *, dequantized: bool) -> _Parts:
    check_operand(x)
    check_denormals(x)
    if x.is_cpu:
        keep_freed_memory()
    fmt, stats, heavy = job.fmt, job.stats, job.heavy
    x_t = tiled(x.detach().to(torch.float32), job.tile)
    magnitude_t = x_t.abs()
    amax = magnitude_t.amax((1, 3))
    kind = _look(amax, job.eps) if given is None and job.force_scale_1 else Kind.ANY
    if kind is Kind.ANY:
        amax = magnitude_t.nan_to_num(0.0, posinf=INF).amax((1, 3))
    scale, quotient = tile_scale(amax, job, x.dtype, ordinary=kind is Kind.ORDINARY)
    if given is not None:
        scale = check_scale(given, (amax.shape[0], amax.shape[1]), x)
    scale_inv = torch.ones_like(scale).div_(scale)

    y_t = magnitude_t * spread(scale)
    saturated = reference_stats.saturated(y_t, magnitude_t, fmt) if stats and kind is Kind.ANY else None
    rounded_t = round_to_grid(y_t.clamp_(max=fmt.max_finite), fmt)
    values_t = torch.copysign(rounded_t, x_t)
    if kind is Kind.ANY:
        values_t.masked_fill_(rounded_t.isnan(), float("nan"))  # one NaN code, whatever sign came in
    dequantized_t = values_t * spread(scale_inv) if dequantized or heavy else None
    if not stats:
        return _Parts(values_t, scale_inv, dequantized_t, None)
    operand = reference_stats.Operand(
        kind,
        x_t,
        magnitude_t,
        rounded_t,
        dequantized_t if heavy else None,
        amax,
        scale,
        scale_inv,
        quotient,
        saturated,
    )
    measured = reference_stats.measure(operand, (x.shape[0], x.shape[1]), job)
    return _Parts(values_t, scale_inv, dequantized_t, measured)
