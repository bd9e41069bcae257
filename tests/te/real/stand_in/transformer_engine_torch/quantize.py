"""Quantisers of the extension: an exact class of Transformer Engine in, one of its tensors out."""

import importlib
import inspect

import torch

from . import layouts
from .enums import LARGEST, TORCH, Float8BlockScaleTensorFormat

KINDS = {  # quantiser -> (tensor, its storage since 2.10, its storage before)
    "Float8BlockQuantizer": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
    "MXFP8Quantizer": ("mxfp8_tensor", "MXFP8Tensor"),
    "Float8Quantizer": ("float8_tensor", "Float8Tensor"),
    "Float8CurrentScalingQuantizer": ("float8_tensor", "Float8Tensor"),
}


def checked(quantizer):
    """The name of the quantiser's class.

    Raises:
        RuntimeError: it is not exactly one of Transformer Engine's own classes; the extension compares types.
    """
    cls = type(quantizer)
    if cls.__name__ not in KINDS or not cls.__module__.startswith("transformer_engine."):
        raise RuntimeError("in function convert_quantizer: Unexpected type for quantizer")
    return cls.__name__


def _classes(kind):
    module, name = KINDS[kind]
    package = "transformer_engine.pytorch.tensor."
    public = getattr(importlib.import_module(package + module), name)
    for place, suffix in ((f"storage.{module}_storage", "Storage"), (f"_internal.{module}_base", "Base")):
        try:
            return public, getattr(importlib.import_module(package + place), name + suffix)
        except ImportError:
            continue
    raise RuntimeError(f"{name} has no storage where it is looked for: not a version that is known")


def quantize(tensor, quantizer, output=None, noop=None):
    """As `tex.quantize`: a new tensor, or `output` filled."""
    if quantizer is None:
        return tensor
    kind = checked(quantizer)
    if noop is not None and bool(noop.item()):
        return output
    x = tensor.detach()
    flat, shape = x.reshape(-1, x.shape[-1]), tuple(x.shape)
    make = {"Float8BlockQuantizer": _blockwise, "MXFP8Quantizer": _mx}.get(kind, _per_tensor)
    fields = make(flat, shape, quantizer)
    public, storage = _classes(kind)
    if output is not None:
        for name, value in fields.items():
            _set(output, name, value)
        return output
    accepted = inspect.signature(storage.__new__).parameters
    if "data_format" in accepted and kind == "Float8BlockQuantizer":
        fields["data_format"] = Float8BlockScaleTensorFormat.GEMM_READY
    if kind != "MXFP8Quantizer" or "with_gemm_swizzled_scales" not in accepted:
        fields.pop("with_gemm_swizzled_scales", None)
    fields |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if not quantizer.internal:
        return public(shape=shape, dtype=x.dtype, requires_grad=False, **fields)
    return storage(**fields, **({"fake_dtype": x.dtype} if "fake_dtype" in accepted else {}))


def _set(output, name, value):
    attribute = {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}.get(name, f"_{name}")
    if hasattr(output, attribute):
        setattr(output, attribute, value)
    if name == "data_transpose":
        output._transpose_invalid = value is None


def _both(layout, flat, quantizer):
    absent = (None, None)
    row = layout(flat, quantizer, False) if quantizer.rowwise_usage else absent
    column = layout(flat, quantizer, True) if quantizer.columnwise_usage else absent
    return row, column


def _blockwise(flat, shape, quantizer):
    row, column = _both(layouts.blockwise, flat, quantizer)
    return {
        "rowwise_data": None if row[0] is None else row[0].view(shape),
        "rowwise_scale_inv": row[1],
        "columnwise_data": None if column[0] is None else column[0].view(shape[-1], *shape[:-1]),
        "columnwise_scale_inv": column[1],
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
    }


def _mx(flat, shape, quantizer):
    row, column = _both(layouts.mx, flat, quantizer)
    return {
        "rowwise_data": None if row[0] is None else row[0].view(shape),
        "rowwise_scale_inv": row[1],
        "columnwise_data": None if column[0] is None else column[0].view(shape),
        "columnwise_scale_inv": column[1],
        "with_gemm_swizzled_scales": bool(getattr(quantizer, "optimize_for_gemm", False)),
    }


def _per_tensor(flat, shape, quantizer):
    kind = int(quantizer.dtype)
    amax = layouts.amax_of(flat.float(), (0, 1)).reshape(1) if flat.numel() else torch.zeros(1)
    if hasattr(quantizer, "force_pow_2_scales"):  # current scaling
        how = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        scale = layouts.scale_of(amax, LARGEST[kind], *how, torch.float32)
    else:
        scale = quantizer.scale.reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    codes = layouts.cast(flat.float() * scale, kind)
    rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "data": codes.view(shape) if rowwise or not columnwise else None,
        "data_transpose": codes.t().contiguous().view(shape[-1], *shape[:-1]) if columnwise else None,
        "fp8_scale_inv": 1.0 / scale,
    }


def dequantize(input, otype):
    shape = input.shape if isinstance(input, torch.Tensor) else input.size()
    rowwise = getattr(input, "_data", None) is not None or getattr(input, "_rowwise_data", None) is not None
    return layouts.values(input, not rowwise).to(TORCH[int(otype)]).view(shape)


def split_quantize(tensor, split_sections, quantizer_list, disable_bulk_allocation=False):
    parts = torch.split(tensor, list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def bgrad_quantize(input, quantizer):
    checked(quantizer)
    return input.reshape(-1, input.shape[-1]).sum(0), quantize(input, quantizer)


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    return quantize(torch.zeros(*shape, dtype=dtype), quantizer)


def fp8_transpose(input, dtype, *, out=None):
    flat = input.reshape(-1, input.shape[-1]).t().contiguous().view(input.shape[-1], *input.shape[:-1])
    return flat if out is None else out.copy_(flat)


def compute_amax(input, amax):
    amax.copy_(layouts.amax_of(input.float(), tuple(range(input.dim()))).reshape(amax.shape))


def fused_amax_and_scale_update_after_reduction(amax_buffer, amax_histories, scales, algorithm, fp8_dtype, margin):
    """The roll of delayed scaling."""
    first = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        n = history.shape[1]
        history[0] = amax_buffer[first : first + n]
        first += n
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0] = 0
        new = LARGEST[int(fp8_dtype)] / amax / 2**margin
        new = new.where((amax > 0) & amax.isfinite(), scale)
        scale.copy_(new.clamp(max=torch.finfo(torch.float32).max))
