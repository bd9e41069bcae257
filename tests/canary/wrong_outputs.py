"""What tests/canary/test_own_forward.py and others share."""

from __future__ import annotations

import torch


def bytes_of(codes):
    return codes.view(torch.uint8)


def elsewhere(codes, scale_inv):
    return bytes_of(codes).roll(16, 1).view(codes.dtype), scale_inv


def garbage(codes, scale_inv):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 120, codes.shape, dtype=torch.uint8, generator=g).view(codes.dtype), scale_inv


def zeroed(codes, scale_inv):
    return torch.zeros_like(bytes_of(codes)).view(codes.dtype), scale_inv
