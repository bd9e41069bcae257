"""What this rank holds of a tensor of tensor parallelism, as its own GEMM reads it.

Shapes:     DTensor [N, K] sharded over ranks -> [n, K] or [N, k], the same memory     Thread: training, and autograd's
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

DTENSOR = "DTensor"


def is_dtensor(tensor: Any) -> bool:
    """By the name of its class, so that torch.distributed is not imported."""
    return type(tensor).__name__ == DTENSOR and hasattr(tensor, "_local_tensor")


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is.

    A part that is on its way between ranks is given where a GEMM has waited for it already; nothing waits here.
    """
    if not is_dtensor(tensor):
        return tensor
    part: Any = tensor._local_tensor
    return part.elem if getattr(part, "completed", False) and isinstance(getattr(part, "elem", None), Tensor) else part
