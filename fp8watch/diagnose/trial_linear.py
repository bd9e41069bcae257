"""A Linear whose GEMMs read what a trial makes of their operands: any format, any subset of the three GEMMs.

Shapes:     x [..., K], weight [N, K], bias [N] -> y [..., N]
Thread:     the caller's

The products are those of `fp8watch.kernels.emulated_gemm`: float32, the bias in float32, the cast last. A GEMM that is not
part of the trial computes what F.linear would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8watch.kernels import emulated_gemm
from fp8watch.recipe import GEMMS

Read = Callable[[str, Tensor, bool], Tensor]
"""(operand, operand [M, K], columnwise) -> what a GEMM reads of it, float32 [M, K]."""


@dataclass(frozen=True)
class Trial:
    """What is tried on one Linear."""

    read: Read
    gemms: Collection[str] = tuple(GEMMS)


class _TrialLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, trial: Trial, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.trial, ctx.bias_dtype = trial, None if bias_N is None else bias_N.dtype
        if "fprop" in trial.gemms:
            return trial_fprop(x_MK, weight_NK, bias_N, trial.read, dtype)
        return plain_fprop(x_MK, weight_NK, bias_N, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_MN,) = grads
        x_MK, weight_NK = ctx.saved_tensors
        read, gemms = ctx.trial.read, ctx.trial.gemms
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if "dgrad" in gemms:
                dx = trial_dgrad(grad_MN, weight_NK, read, x_MK.dtype)
            else:
                dx = grad_MN.mm(weight_NK.to(grad_MN.dtype)).to(x_MK.dtype)
        if ctx.needs_input_grad[1]:
            if "wgrad" in gemms:
                dw = trial_wgrad(grad_MN, x_MK, read, weight_NK.dtype)
            else:
                dw = grad_MN.t().mm(x_MK.to(grad_MN.dtype)).to(weight_NK.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = grad_MN.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def trial_fprop(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, read: Read, dtype: torch.dtype) -> Tensor:
    """[M, N] of dtype, from operands as they are read rowwise."""
    return emulated_gemm.fprop(read("input", x_MK, False), read("weight", weight_NK, False), bias_N, dtype)


def trial_dgrad(grad_MN: Tensor, weight_NK: Tensor, read: Read, dtype: torch.dtype) -> Tensor:
    """[M, K] of dtype, from the gradient read rowwise and the weight read columnwise."""
    return emulated_gemm.dgrad(read("grad_output", grad_MN, False), read("weight", weight_NK, True), dtype)


def trial_wgrad(grad_MN: Tensor, x_MK: Tensor, read: Read, dtype: torch.dtype) -> Tensor:
    """[N, K] of dtype, from both operands read columnwise."""
    return emulated_gemm.wgrad(read("grad_output", grad_MN, True), read("input", x_MK, True), dtype)


def plain_fprop(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What F.linear gives in that dtype."""
    return F.linear(x_MK.to(dtype), weight_NK.to(dtype), None if bias_N is None else bias_N.to(dtype))


def trial_linear(x: Tensor, weight: Tensor, bias: Tensor | None, trial: Trial, dtype: torch.dtype) -> Tensor:
    """The output of a Linear under a trial.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        trial: which GEMMs read what.
        dtype: of the output; that of the plain Linear's.
    """
    rows = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _TrialLinear.apply(rows, weight, bias, trial, dtype)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], weight.shape[0])
