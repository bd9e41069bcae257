"""The three GEMMs of a Linear, emulated: float32 products of dequantised operands.

Shapes:     see each function     Thread: training

A block-scaled GEMM accumulates each 128-wide slice of the contraction in float32, multiplies by both scales and
adds to a float32 sum. A float32 product of the dequantised operands differs from float64 by less than 3e-7 of
the result's RMS, five orders under the quantisation itself, so it stands in for the kernel where there is none.

Which operand feeds which GEMM (contraction axis last, tiles along it):
    fprop   output_MN     = input_MK rowwise 1×128       · weight_NK 128×128
    dgrad   grad_input_MK = grad_output_MN rowwise 1×128 · weight_NK 128×128, transposed, same scales
    wgrad   grad_weight_NK = grad_output_MN columnwise 1×128 · input_MK columnwise 1×128
Legend: M tokens, K in features, N out features.
"""

from __future__ import annotations

import torch

_num_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def fprop(
    input_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return input · weightᵀ + bias as [M, N] of dtype: the bias is added in float32, the cast comes last."""
    output_MN = _mm(input_MK, weight_NK.t())
    if bias_N is not None and not torch.compiler.is_compiling() and _num_dispatch_modes():
        output_MN = output_MN + bias_N.to(torch.float32)  # selective checkpointing may have kept the product
    elif bias_N is not None:
        output_MN += bias_N.to(torch.float32)
    return output_MN.to(dtype)


def dgrad(grad_output_MN: torch.Tensor, weight_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return grad_output · weight as [M, K] of dtype."""
    return _mm(grad_output_MN, weight_NK).to(dtype)


def wgrad(grad_output_MN: torch.Tensor, input_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return grad_outputᵀ · input as [N, K] of dtype. Both are the columnwise copies: contracted over M."""
    return _mm(grad_output_MN.t(), input_MK).to(dtype)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply in float32, also where autocast would take bfloat16.

    Raises:
        TypeError: an operand is not float32.
    """
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise TypeError(f"operands are {a.dtype} and {b.dtype}: must be float32, as quantize_dequantize returns them")
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a, b)
    return torch.mm(a, b)
