"""An FP8 Linear with a forward of its own, as training scripts write them: one scale a tensor, torch._scaled_mm inside.

Its two steps are functions of this module, so that a test can break one: `cast` (operand, dtype, where) -> codes and
scale_inv, and `product` (codes, scales, where) -> values. `where` is the GEMM, and of a cast the operand too.
"""

from __future__ import annotations

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(x, dtype, where):
    amax = x.abs().amax().float().clamp_min(1e-12) if x.numel() else torch.tensor(1.0)
    scale = torch.finfo(dtype).max / amax
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype), 1 / scale


def product(a, scale_a, b, scale_b, dtype, where):
    """[M, K] · [N, K]ᵀ; the second operand lies row by row."""
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        (a, sa), (b, sb) = cast(x, E4M3, "fprop input"), cast(weight, E4M3, "fprop weight")
        return product(a, sa, b, sb, x.dtype, "fprop")

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        (a, sa), (b, sb) = cast(g, E5M2, "dgrad grad_output"), cast(weight, E4M3, "dgrad weight")
        dx = product(a, sa, b.t(), sb, x.dtype, "dgrad")
        (a, sa), (b, sb) = cast(g, E5M2, "wgrad grad_output"), cast(x, E4M3, "wgrad input")
        return dx, product(a.t(), sa, b.t(), sb, weight.dtype, "wgrad")


class ScriptFloat8Linear(nn.Linear):
    def forward(self, x):
        y = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Small(nn.Module):
    """As the plain small model, with its Linears in FP8."""

    def __init__(self, width=160):
        super().__init__()
        self.a, self.b = ScriptFloat8Linear(width, 272), ScriptFloat8Linear(272, 144, bias=False)
        self.c = ScriptFloat8Linear(144, width)

    def forward(self, x):
        return (x + self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))).square().mean()
