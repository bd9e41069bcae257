"""Quantisers and the storage of what they make."""

from enum import Enum

import torch

from fp8watch.formats import FORMATS
from fp8watch.kernels import reference


class DType(Enum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Quantizer:
    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __call__(self, tensor):
        return self.quantize_impl(tensor)


def _padded(scale, multiple=4):
    """What pads a scale tensor is not initialised there: here it is NaN, so that nobody reads it unnoticed."""
    columns = -(-scale.shape[1] // multiple) * multiple
    out = torch.full((scale.shape[0], columns), float("nan"))
    out[:, : scale.shape[1]] = scale
    return out


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
        x = tensor.detach().reshape(-1, tensor.shape[-1])
        return Float8BlockwiseQTensorStorage(x, self)


class Float8BlockwiseQTensorStorage:
    def __init__(self, x, quantizer):
        self._quantizer = quantizer.copy()
        self._fp8_dtype = quantizer.dtype
        self._is_2D_scaled = quantizer.block_scaling_dim == 2
        self._rowwise_data = self._rowwise_scale_inv = self._columnwise_data = self._columnwise_scale_inv = None
        self._fmt = FORMATS["E4M3" if quantizer.dtype is DType.kFloat8E4M3 else "E5M2"]
        how = (self._fmt, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        if self._is_2D_scaled:
            codes, scale_inv, _ = reference.quantize(x, (128, 128), *how, stats=False)
            self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), _padded(scale_inv)
            self._columnwise_data = codes.view(torch.uint8).t().contiguous()
            self._columnwise_scale_inv = _padded(scale_inv.t())
            return
        if quantizer.rowwise_usage:
            codes, scale_inv, _ = reference.quantize(x, (1, 128), *how, stats=False)
            self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), _padded(scale_inv.t())
        if quantizer.columnwise_usage:
            codes, scale_inv, _ = reference.quantize(x, (128, 1), *how, stats=False)
            self._columnwise_data = codes.view(torch.uint8).t().contiguous()
            self._columnwise_scale_inv = _padded(scale_inv)

    def wide(self, columnwise):
        """Dequantised, in the operand's own rows × columns."""
        from fp8watch.integrations.te_tensors import view_of

        view = view_of(self, columnwise)
        return reference.dequantize(view.codes.contiguous().view(self._fmt.dtype), view.scale_inv, view.tile)
