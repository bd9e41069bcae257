"""A Linear whose three GEMMs multiply codes: torch._scaled_mm, blockwise, chosen by `attach(gemm="scaled_mm")`.

Shapes:     x [M, K], weight [N, K], bias [N] -> y [M, N]
Thread:     training, and autograd's

Saved for backward are codes and scales, a byte an element of input and weight, as on the emulated path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8watch.kernels import scaled_mm
from fp8watch.kernels.scaled_mm import Codes
from fp8watch.layers.autograd_signature import signature_known
from fp8watch.layers.custom_ops import look_at_output, quantize_codes
from fp8watch.layers.double_backward import once_only
from fp8watch.layers.vmap_rules import refuse_vmap
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT

Formats = tuple[torch.dtype, torch.dtype, torch.dtype]
"""Dtypes of the codes of input, weight and grad_output."""


@signature_known
class ScaledLinear(torch.autograd.Function):
    """y = x·wᵀ + b from codes."""

    vmap = staticmethod(refuse_vmap)

    @staticmethod
    def forward(
        x_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        site: Tensor,
        count: bool,
        wgrad: bool,
        formats: Formats,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(x_MK.device.type, enabled=False):
            xr, xr_scale, xc, xc_scale = quantize_codes(x_MK, site, INPUT, count=count, rowwise=True, columnwise=wgrad)
            w, w_scale, _, _ = quantize_codes(weight_NK, site, WEIGHT, count=count, rowwise=True, columnwise=False)
            input, weight = _codes(xr, xr_scale, formats[INPUT]), _codes(w, w_scale, formats[WEIGHT])
            y = scaled_mm.fprop(input, weight, bias_N, x_MK.dtype)
            if count:
                look_at_output(y, site, INPUT, False, input.data, weight.data, bias_N, xr_scale, w_scale)
            return y, xc, xc_scale, w, w_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, site, count, wgrad, formats = inputs
        _, xc, _, *rest = output  # by the third `once_only` reaches x and weight
        ctx.mark_non_differentiable(*(output[1:] if torch.compiler.is_compiling() else (xc, *rest)))
        ctx.set_materialize_grads(torch.compiler.is_compiling())
        ctx.save_for_backward(*output[1:], site)
        ctx.count, ctx.wgrad, ctx.formats = count, wgrad, formats
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if grad_MN is None:  # what reads y gives it none: then there is none in front of it
            return (None,) * 7
        xc, xc_scale, w, w_scale, site = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        of_input, of_weight, of_grad = ctx.formats
        dgrad, wgrad = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and ctx.wgrad
        dx = dw = db = None
        with torch.no_grad(), torch.autocast(grad_MN.device.type, enabled=False):
            if dgrad or wgrad:
                gr, gr_scale, gc, gc_scale = quantize_codes(
                    grad_MN, site, GRAD_OUTPUT, count=ctx.count, rowwise=dgrad, columnwise=wgrad
                )
                if dgrad:
                    grad, weight = _codes(gr, gr_scale, of_grad), _codes(w, w_scale, of_weight)
                    dx = scaled_mm.dgrad(grad, weight, x_dtype)
                    if ctx.count:
                        look_at_output(dx, site, GRAD_OUTPUT, False, grad.data, weight.data, None, gr_scale, w_scale)
                if wgrad:
                    grad, input = _codes(gc, gc_scale, of_grad), _codes(xc, xc_scale, of_input)
                    dw = scaled_mm.wgrad(grad, input, weight_dtype)
                    if ctx.count:
                        look_at_output(dw, site, GRAD_OUTPUT, True, grad.data, input.data, None, gc_scale, xc_scale)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            with torch.autocast(grad_MN.device.type, enabled=False):
                db = grad_MN.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        made_of = grad_MN, xc_scale
        return once_only(dx, *made_of), once_only(dw, *made_of), db, None, None, None, None


def _codes(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Codes:
    return Codes(data.view(dtype), scale_inv)
