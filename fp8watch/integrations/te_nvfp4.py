"""Reads Transformer Engine's NVFP4 tensors: packed E2M1 codes under scales of two levels.

Shapes:     packed codes [M, K/2], E4M3 scales [~M, ~K/16], amax of the tensor -> codes [M, K], scale_inv [M, K/16]

A block of 16 along the contraction has a scale in E4M3, and the tensor one in float32: x̂ = code · E4M3 · amax / (6 · 448).
A weight has blocks of 16×16, whose scale is there 16 times. A block whose E4M3 scale is 0 is lost: all of it becomes 0, and
counts as underflow. Columnwise copies of inputs and gradients are of the operand after a Hadamard transform of 16 rows, with
signs, and have an amax of their own: what is measured there is the operand after it (`rotated`). Gradients are rounded
stochastically, so codes are compared with nothing.

Source: transformer_engine/pytorch/tensor/nvfp4_tensor.py and custom_recipes/reference_nvfp4.py, versions 2.16 to 2.20.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8watch.numerics.formats import E2M1

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes 0 to 7; 8 to 15 are their negatives."""
_SMALLEST = 2.0**-9  # of E4M3: what stands for a scale of 0
_E4M3_MAX = 448.0


def decoded(codes: Tensor) -> Tensor:
    """Values of codes 0 to 15: float32, same shape."""
    code = torch.arange(16, device=codes.device)  # computed there: a table that is copied would make the host wait
    exponent, mantissa = (code >> 1) & 3, code & 1
    twice = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp_(min=0))
    return (twice * (0.5 - (code >> 3))).to(torch.float32)[codes.long()]


def is_nvfp4(tensor: Any) -> bool:
    """Whether a tensor holds NVFP4: of the stock quantiser, or of the reference in Python."""
    return hasattr(tensor, "_fp4_dtype") or (hasattr(tensor, "global_amax_row") and hasattr(tensor, "data_t"))


def parts_of(tensor: Any, columnwise: bool) -> tuple[Tensor, Tensor, float] | str:
    """Codes [M, K] uint8 and scale_inv in the operand's own rows × columns, and largest E4M3 scale; or a reason."""
    stock = hasattr(tensor, "_fp4_dtype")
    names = (
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise") if columnwise
        else ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
    ) if stock else (("data_t", "scale_t", "global_amax_col") if columnwise else ("data", "scale", "global_amax_row"))  # fmt: skip
    data, scale, amax = (getattr(tensor, name, None) for name in names)
    if data is None or scale is None or amax is None or not data.numel():
        return "it holds no codes of the direction that is multiplied"
    most = float(getattr(tensor, "_nvfp4_e4m3_max" if stock else "nvfp4_e4m3_max", _E4M3_MAX))
    packed = data.reshape(-1, data.shape[-1]).view(torch.uint8)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(packed.shape[0], -1)
    rows, blocks = codes.shape[0], -(-codes.shape[1] // BLOCK)
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        if scale.dim() != 2 or scale.shape[0] % 128 or scale.shape[1] % 4:
            return f"{list(scale.shape)} scales do not fit {list(codes.shape)} codes"
        long, short = scale.shape
        scale = scale.reshape(long // 128, short // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(long, short)
    scale = scale[:rows, :blocks]
    if tuple(scale.shape) != (rows, blocks):
        return f"{list(scale.shape)} scales do not fit {list(codes.shape)} codes"
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e4m3fn)
    values, level = scale.float(), amax.detach().float().reshape(-1, 1) / (E2M1.max_finite * most)
    if level.shape[0] not in (1, rows):
        return f"it has {level.shape[0]} amaxes, where 1 or {rows} are known"
    lost = values == 0
    codes = codes.masked_fill(lost.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]], 0)
    scale_inv = torch.where(lost, _SMALLEST, values) * torch.where(level == 0, 1.0, level)
    return (codes.t(), scale_inv.t().contiguous(), most) if columnwise else (codes, scale_inv.contiguous(), most)


def rotated(x: Tensor, tensor: Any, columnwise: bool) -> Tensor | None:
    """The operand as it enters the cast [M, K] float32: after the transform, where there is one; None where that is not known."""
    quantizer: Any = getattr(tensor, "_quantizer", None)
    if not columnwise or not getattr(quantizer, "with_rht", False):
        return x
    if x.shape[0] % BLOCK:
        return None
    matrix: Tensor | None = getattr(quantizer, "rht_matrix", None)
    if matrix is None and hasattr(quantizer, "_build_hadamard_matrix"):
        signs = bool(getattr(quantizer, "with_random_sign_mask", True))
        matrix = quantizer._build_hadamard_matrix(BLOCK, x.device, x.dtype, signs) * (1.0 / BLOCK**0.5)
    if matrix is None or tuple(matrix.shape) != (BLOCK, BLOCK):
        return None
    turned = x.t().contiguous().view(-1, BLOCK) @ matrix.to(x.dtype)
    return turned.view(x.shape[1], x.shape[0]).t()
