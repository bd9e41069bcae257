import torch
from torch import nn


class BasicLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.02)


class Linear(nn.Module):
    """Its product is made by what fuses operations, not by a forward of its own."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.basic = BasicLinear(in_features, out_features)

    def forward(self, inp):
        return inp @ self.basic.weight.t()
