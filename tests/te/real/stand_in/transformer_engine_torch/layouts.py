"""Codes and scales of one direction of an operand, in the memory layout that Transformer Engine's GEMMs read.

Formulas: transformer_engine/common/recipe/recipe_common.cuh and the casts of mxfp8. What pads a scale tensor is not
initialised there; here it is NaN, or a byte that no healthy scale has.
"""

import torch
import torch.nn.functional as F

from .enums import LARGEST, TORCH


def amax_of(x, dims):
    """NaN is ignored, Inf is not."""
    return x.abs().nan_to_num(0.0, posinf=float("inf")).amax(dims)


def scale_of(amax, largest, power_2, eps, dtype):
    """largest / amax, a power of two if asked for, and 1 where that is nothing to divide by."""
    amax = amax.clamp(min=eps)
    useless = (amax == 0) | ~amax.isfinite()
    scale = (largest / amax.masked_fill(useless, 1.0)).clamp(max=torch.finfo(dtype).max)
    if power_2:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scale.masked_fill(useless, 1.0)


def cast(y, kind):
    """Saturating; NaN stays NaN."""
    return y.clamp(-LARGEST[kind], LARGEST[kind]).to(TORCH[kind]).view(torch.uint8)


def tiled(x, tile):
    """[Mt, bm, Kt, bk], filled up with zeros."""
    bm, bk = tile
    full = F.pad(x.float(), (0, -x.shape[1] % bk, 0, -x.shape[0] % bm))
    return full.reshape(full.shape[0] // bm, bm, full.shape[1] // bk, bk)


def _codes(t, scale, shape, kind):
    y = (t * scale[:, None, :, None]).reshape(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3])
    return cast(y[: shape[0], : shape[1]], kind)


def blockwise(x, quantizer, columnwise):
    """1×128 or 128×128 blocks, float32 scales. Columnwise codes are those of the transpose."""
    kind, square = int(quantizer.dtype), quantizer.block_scaling_dim == 2
    t = tiled(x, (128, 128) if square else (128, 1) if columnwise else (1, 128))
    power_2, eps = quantizer.force_pow_2_scales, quantizer.amax_epsilon
    scale = scale_of(amax_of(t, (1, 3)), LARGEST[kind], power_2, eps, x.dtype)
    codes, inverse = _codes(t, scale, x.shape, kind), 1.0 / scale
    if columnwise == square:
        inverse = inverse.t()
    inverse = F.pad(inverse, (0, -inverse.shape[1] % 4), value=float("nan"))
    return (codes.t() if columnwise else codes).contiguous(), inverse.contiguous()


def mx(x, quantizer, columnwise):
    """Groups of 32, E8M0 scales. Columnwise codes are not transposed."""
    kind = int(quantizer.dtype)
    t = tiled(x, (32, 1) if columnwise else (1, 32))
    exponent = _e8m0(amax_of(t, (1, 3)) * (1.0 / LARGEST[kind]))
    factor = torch.exp2(127.0 - exponent.float()).masked_fill(exponent == 0, 1.0)
    codes = _codes(t, factor, x.shape, kind)
    rows, columns = (4, 128) if columnwise else (128, 4)
    pad = (0, -exponent.shape[1] % columns, 0, -exponent.shape[0] % rows)
    scales = F.pad(exponent.to(torch.uint8), pad, value=0xAB)
    return codes, swizzled(scales, columnwise) if getattr(quantizer, "optimize_for_gemm", False) else scales


def _e8m0(v):
    """Rounded up to a power of two: its biased exponent."""
    bits = v.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    subnormal = (exponent == 0) & (mantissa <= 0x400000)
    exponent = exponent + ((mantissa > 0) & (exponent != 0xFE) & ~subnormal)
    return exponent.masked_fill(v.isinf(), 0xFE).masked_fill(v == 0, 0)


def swizzled(scales, columnwise):
    """128×4 tiles in the order of the tensor cores; columnwise scales are those of the transpose."""
    plain = scales.t() if columnwise else scales
    m, k = plain.shape
    return plain.reshape(m // 128, 4, 32, k // 4, 4).permute(0, 3, 2, 1, 4).reshape(scales.shape).contiguous()


def unswizzled(scales, columnwise):
    """The inverse, element by element."""
    places = swizzled(torch.arange(scales.numel()).reshape(scales.shape), columnwise).flatten()
    out = torch.empty_like(scales).flatten()
    out[places] = scales.flatten()
    return out.reshape(scales.shape)


def values(tensor, columnwise):
    """What a GEMM reads of an operand in one direction: float32, in the operand's own rows × columns.

    Raises:
        RuntimeError: the direction has no codes, as the GEMM would find out.
    """
    if not hasattr(tensor, "_fp8_dtype"):
        return tensor.detach().reshape(-1, tensor.shape[-1]).float()
    kind = TORCH[int(tensor._fp8_dtype)]
    if hasattr(tensor, "_scale_inv"):
        data = None if tensor._transpose is None or tensor._transpose_invalid else tensor._transpose
        data = data if columnwise else tensor._data
    else:
        data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    if data is None:
        raise RuntimeError(
            f"{type(tensor).__name__} has no {'columnwise' if columnwise else 'rowwise'} codes to multiply"
        )
    if hasattr(tensor, "_scale_inv"):
        flat = data.reshape(data.shape[0], -1).t() if columnwise else data.reshape(-1, data.shape[-1])
        return flat.contiguous().view(kind).float() * tensor._scale_inv
    scales = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    if scales.dtype == torch.uint8:
        if getattr(tensor, "_with_gemm_swizzled_scales", False):
            scales = unswizzled(scales, columnwise)
        codes, tile = data.reshape(-1, data.shape[-1]), (32, 1) if columnwise else (1, 32)
        scales = torch.exp2(scales.float() - 127.0)
    elif tensor._is_2D_scaled:
        codes = data.reshape(data.shape[0], -1).t() if columnwise else data.reshape(-1, data.shape[-1])
        scales, tile = scales.t() if columnwise else scales, (128, 128)
    else:
        codes = data.reshape(data.shape[0], -1).t() if columnwise else data.reshape(-1, data.shape[-1])
        scales, tile = scales if columnwise else scales.t(), (128, 1) if columnwise else (1, 128)
    rows, columns = codes.shape
    wide = scales.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    return codes.contiguous().view(kind).float() * wide
