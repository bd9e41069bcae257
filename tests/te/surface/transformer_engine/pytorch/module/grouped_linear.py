import torch
from torch import nn

from ..cpp_extensions import general_grouped_gemm
from .base import TransformerEngineBaseModule


class GroupedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, splits, quantizers, *weights):
        parts = torch.split(x, splits)
        xq = [q[0](p) for q, p in zip(quantizers, parts, strict=True)]
        wq = [q[1](w) for q, w in zip(quantizers, weights, strict=True)]
        ctx.saved, ctx.splits, ctx.quantizers = (xq, wq), splits, quantizers
        return torch.cat(general_grouped_gemm(wq, xq, layout="TN", m_splits=splits))

    @staticmethod
    def backward(ctx, grad):
        xq, wq = ctx.saved
        gq = [q[2](p) for q, p in zip(ctx.quantizers, torch.split(grad, ctx.splits), strict=True)]
        dx = torch.cat(general_grouped_gemm(wq, gq, layout="NN", m_splits=ctx.splits, grad=True))
        return dx, None, None, *general_grouped_gemm(xq, gq, layout="NT", m_splits=ctx.splits, grad=True)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(self, num_gemms, in_features, out_features):
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            setattr(self, f"weight{i}", nn.Parameter(torch.randn(out_features, in_features) * 0.02))
        self.make_quantizers()

    def forward(self, inp, m_splits):
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return GroupedProducts.apply(inp, m_splits, self.quantizers, *weights)
