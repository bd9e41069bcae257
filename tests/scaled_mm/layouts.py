"""Memory layouts of operands for torch._scaled_mm."""

from __future__ import annotations

import torch

from fp8watch.kernels.scaled_mm import Codes


def column_major(weight: Codes) -> Codes:
    """The same operand with column-major codes, which `dgrad` and `wgrad` need not copy."""
    data = weight.data.view(torch.uint8).t().contiguous().t()
    return Codes(data.view(weight.data.dtype), weight.scale_inv)
