"""Some elements of a gradient, where they lie: what is held against the same elements later.

Shapes:     a tensor -> [PIECES, WIDTH] float32, or a smaller tensor's own shape
Thread:     training, and autograd's; nothing waits for a device
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8watch.layers.operand_check import capturing

PIECES, WIDTH = 16, 128
"""Stretches of neighbouring elements, evenly over the tensor: a sixteenth of it that is wrong is in every sample."""
SAMPLE = PIECES * WIDTH


def sample(x: Tensor, start: int) -> Tensor | None:
    """Float32, a view where `x` is so; None where its elements cannot be read: a tensor of another class, sparse, strided, captured.

    Args:
        x: a gradient, or its first rows on end.
        start: a number that moves the stretches, each within its part of the tensor.
    """
    if type(x) is not Tensor or x.layout is not torch.strided or not x.is_contiguous() or not x.is_floating_point():
        return None
    if not (num := x.numel()) or torch._C._functorch.is_functorch_wrapped_tensor(x) or capturing(x):
        return None
    if num > SAMPLE:
        part = num // PIECES
        offset = x.storage_offset() + start * WIDTH * 5 % (part - WIDTH + 1)
        x = x.as_strided((PIECES, WIDTH), (part, 1), offset)
    return x.detach() if x.dtype is torch.float32 else x.float()
