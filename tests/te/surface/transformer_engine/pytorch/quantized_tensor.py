"""Quantisers and the storage of what they make. As strict as the extension: exact classes, padding that is NaN or
nonsense, mxfp8 scales in the order of the tensor cores, formats whose str() is a number."""

from enum import IntEnum

import torch
import torch.nn.functional as F

from fp8watch.kernels import reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob


class DType(IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Quantizer:
    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __call__(self, tensor):
        return self.quantize_impl(tensor)

    def set_usage(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def make_empty(self, shape):
        if getattr(self, "custom", False):
            raise NotImplementedError(f"{type(self).__name__} class does not implement make_empty function")
        return self.quantize_impl(torch.zeros(shape))


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self, dtype, *, rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=1
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.amax_epsilon, self.force_pow_2_scales = dtype, amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def copy(self):
        return Float8BlockQuantizer(
            self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage, amax_epsilon=self.amax_epsilon,
            force_pow_2_scales=self.force_pow_2_scales, block_scaling_dim=self.block_scaling_dim,
        )  # fmt: skip

    def quantize_impl(self, tensor):
        return Float8BlockwiseQTensorStorage(_flat(tensor), self)

    def update_quantized(self, src, dst, *, noop_flag=None):
        dst.__init__(_flat(src), self)
        return dst


class MXFP8Quantizer(Quantizer):
    def __init__(self, dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def copy(self):
        made = MXFP8Quantizer(self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        made.optimize_for_gemm = self.optimize_for_gemm
        return made

    def quantize_impl(self, tensor):
        return MXFP8TensorStorage(_flat(tensor), self)

    def update_quantized(self, src, dst, *, noop_flag=None):
        dst.__init__(_flat(src), self)
        return dst


def convert_quantizer(quantizer):
    """What the extension does with each quantiser that it is handed: it compares types, not ancestors."""
    if type(quantizer) not in (Float8BlockQuantizer, MXFP8Quantizer):
        raise RuntimeError("in function convert_quantizer: Unexpected type for quantizer")


def bgrad_quantize(grad, quantizer):
    convert_quantizer(quantizer)
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantizer(grad)


def _flat(tensor):
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _padded(scale, multiple=4):
    """What pads a scale tensor is not initialised there: here it is NaN, so that nobody reads it unnoticed."""
    columns = -(-scale.shape[1] // multiple) * multiple
    out = torch.full((scale.shape[0], columns), float("nan"))
    out[:, : scale.shape[1]] = scale
    return out


class _Storage:
    def __init__(self, quantizer):
        self._quantizer = quantizer.copy()
        self._fp8_dtype = quantizer.dtype
        self._rowwise_data = self._rowwise_scale_inv = self._columnwise_data = self._columnwise_scale_inv = None
        self._fmt = FORMATS["E4M3" if quantizer.dtype is DType.kFloat8E4M3 else "E5M2"]

    def _decoded(self, codes, scale_inv, tile):
        if not codes.numel():
            return codes.float()
        return reference.dequantize(codes.contiguous().view(self._fmt.dtype), scale_inv.contiguous(), tile)

    def _held(self, columnwise):
        data = self._columnwise_data if columnwise else self._rowwise_data
        if data is None:
            raise AssertionError(f"{'columnwise' if columnwise else 'rowwise'} usage was not asked for")
        return data, self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv


class Float8BlockwiseQTensorStorage(_Storage):
    def __init__(self, x, quantizer):
        super().__init__(quantizer)
        self._is_2D_scaled = quantizer.block_scaling_dim == 2
        how = (self._fmt, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        rows, columns = x.shape
        if not rows:  # an expert without tokens
            kt = -(-columns // 128)
            self._rowwise_data, self._rowwise_scale_inv = x.to(torch.uint8), torch.empty(kt, 0)
            self._columnwise_data, self._columnwise_scale_inv = x.to(torch.uint8).t(), torch.empty(0, columns)
            return
        if self._is_2D_scaled:
            codes, scale_inv, _ = reference.quantize(x, QuantizeJob((128, 128), *how, stats=False))
            self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), _padded(scale_inv)
            self._columnwise_data = codes.view(torch.uint8).t().contiguous()
            self._columnwise_scale_inv = _padded(scale_inv.t())
            return
        if quantizer.rowwise_usage:
            codes, scale_inv, _ = reference.quantize(x, QuantizeJob((1, 128), *how, stats=False))
            self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), _padded(scale_inv.t())
        if quantizer.columnwise_usage:
            codes, scale_inv, _ = reference.quantize(x, QuantizeJob((128, 1), *how, stats=False))
            self._columnwise_data = codes.view(torch.uint8).t().contiguous()
            self._columnwise_scale_inv = _padded(scale_inv)

    def wide(self, columnwise):
        """Dequantised, in the operand's own rows × columns."""
        data, scale_inv = self._held(columnwise)
        codes = data.t() if columnwise else data
        rows, columns = codes.shape
        mt, kt = -(-rows // 128), -(-columns // 128)
        if self._is_2D_scaled:
            scales, tile = (scale_inv.t() if columnwise else scale_inv)[:mt, :kt], (128, 128)
        elif columnwise:
            scales, tile = scale_inv[:mt, :columns], (128, 1)
        else:
            scales, tile = scale_inv.t()[:rows, :kt], (1, 128)
        return self._decoded(codes, scales, tile)


class MXFP8TensorStorage(_Storage):
    def __init__(self, x, quantizer):
        super().__init__(quantizer)
        self._with_gemm_swizzled_scales = quantizer.optimize_for_gemm
        if quantizer.rowwise_usage:
            self._rowwise_data, self._rowwise_scale_inv = self._cast(x, (1, 32))
        if quantizer.columnwise_usage:
            self._columnwise_data, self._columnwise_scale_inv = self._cast(x, (32, 1))

    def _cast(self, x, tile):
        (bm, bk), (rows, columns) = tile, x.shape
        full = F.pad(x.float(), (0, -columns % bk, 0, -rows % bm))
        t = full.reshape(full.shape[0] // bm, bm, full.shape[1] // bk, bk)
        exponent = torch.ceil(torch.log2(t.abs().amax((1, 3)) / self._fmt.max_finite)).clamp(-127, 127)
        scaled = (t * torch.exp2(-exponent)[:, None, :, None]).reshape(full.shape)[:rows, :columns]
        codes = scaled.to(self._fmt.dtype).view(torch.uint8)
        multiple = (128, 4) if bm == 1 else (4, 128)
        pad = (0, -exponent.shape[1] % multiple[1], 0, -exponent.shape[0] % multiple[0])
        scales = F.pad((exponent + 127).to(torch.uint8), pad, value=0xAB)
        return codes, self._ordered(scales, bm > 1) if self._with_gemm_swizzled_scales else scales

    @staticmethod
    def _ordered(scales, columnwise):
        """128×4 tiles, each as 32×4×4 in memory: where element (i, j) goes, one by one as the hardware's manual says."""
        plain = scales.t() if columnwise else scales
        rows, columns = plain.shape
        i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
        tile = (i // 128) * (columns // 4) + j // 4
        place = tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
        out = torch.empty(rows * columns, dtype=torch.uint8)
        out[place.flatten()] = plain.reshape(-1)
        return out.reshape(scales.shape)

    def wide(self, columnwise):
        """Dequantised, in the operand's own rows × columns."""
        codes, scales = self._held(columnwise)
        if self._with_gemm_swizzled_scales:
            there = torch.arange(scales.numel()).to(torch.int32)
            parts = [self._ordered((there >> s).to(torch.uint8).reshape(scales.shape), columnwise) for s in (0, 8, 16)]
            source = sum(part.to(torch.int64) << s for part, s in zip(parts, (0, 8, 16), strict=True)).flatten()
            plain = torch.empty_like(scales).flatten()
            plain[source] = scales.flatten()
            scales = plain.reshape(scales.shape)
        rows, columns = codes.shape
        shape, tile = ((-(-rows // 32), columns), (32, 1)) if columnwise else ((rows, -(-columns // 32)), (1, 32))
        return self._decoded(codes, torch.exp2(scales[: shape[0], : shape[1]].float() - 127), tile)
