import torch
import torch.nn.functional as F
from torch import nn

from ..cpp_extensions import general_gemm
from .base import Products, TransformerEngineBaseModule


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.02)
        self.make_quantizers()

    def forward(self, inp):
        normed = F.layer_norm(inp, inp.shape[-1:])
        return Products.apply(normed, self.weight, None, self.quantizers[0], lambda *a, **k: general_gemm(*a, **k))
