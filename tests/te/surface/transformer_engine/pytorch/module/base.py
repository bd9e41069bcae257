"""What the modules share: a quantiser an operand, and the three products of one Linear."""

import torch
from torch import nn

from ..quantized_tensor import DType, Float8BlockQuantizer, MXFP8Quantizer, bgrad_quantize

E4M3 = DType.kFloat8E4M3


class TransformerEngineBaseModule(nn.Module):
    num_gemms = 1

    def make_quantizers(self, factory=None, word=lambda kind: kind):
        """`word`: what a factory is asked with: a plain word before 2.16, an object since."""
        kinds = [("input", 1), ("weight", 2), ("grad_output", 1)] * self.num_gemms
        made = [
            Float8BlockQuantizer(E4M3, block_scaling_dim=dim) if factory is None else factory(word(kind))
            for kind, dim in kinds
        ]
        for quantizer in made:
            quantizer.optimize_for_gemm = True
        self.quantizers = [made[i : i + 3] for i in range(0, len(made), 3)]


class Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, quantizers, general_gemm):
        qx, qw, ctx.qg = quantizers
        # modules ask for classes, and so does the extension
        qx.set_usage(rowwise=True, columnwise=isinstance(qx, (Float8BlockQuantizer, MXFP8Quantizer)))
        xq, wq = qx(x), qw(w)
        ctx.saved, ctx.gemm, ctx.biased = (xq, wq), general_gemm, bias is not None
        ctx.shape = x.shape
        ctx.save_for_backward(x)  # so that checkpointing has something to recompute
        y = general_gemm(wq, xq, layout="TN")[0].reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 1
        xq, wq = ctx.saved
        db, gq = bgrad_quantize(grad, ctx.qg) if ctx.biased else (None, ctx.qg(grad))
        dx = ctx.gemm(wq, gq, layout="NN", grad=True)[0].reshape(ctx.shape) if ctx.needs_input_grad[0] else None
        dw = ctx.gemm(xq, gq, layout="NT", grad=True)[0]
        return dx, dw, db, None, None
