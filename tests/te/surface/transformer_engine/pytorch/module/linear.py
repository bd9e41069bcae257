import torch
from torch import nn

from ..cpp_extensions import general_gemm
from .base import Products, TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.make_quantizers()

    def forward(self, inp):
        return Products.apply(inp, self.weight, self.bias, self.quantizers[0], lambda *a, **k: general_gemm(*a, **k))
