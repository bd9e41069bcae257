"""A few elements of each tensor of an optimizer: which they are, how they are read, and whether they are those read before.

Shapes:     T tensors -> their bits [T · WIDTH]; one call of the C library on a CPU where it is loaded, else torch
Thread:     training; nothing waits for a device
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.kernels.cpu_standing import Pieces

WIDTH = 64
GOLDEN = 0.6180339887498949
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class StandingElements:
    """WIDTH neighbouring elements of each of T tensors. They hold the memory of these tensors.

    Args:
        tensors: as `readable` returns them, on one device.
        offset: WIDTH times the turn: which elements are looked at.
    """

    def __init__(self, tensors: Sequence[Tensor], offset: int) -> None:
        with torch.no_grad():
            self.views = [_part(x, offset) for x in tensors]
        self._pieces = _pieces(self.views)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers whose bits `read` returns."""
        return reduce(torch.promote_types, (view.dtype for view in self.views))

    def read(self, spare: Tensor | None = None) -> Tensor:
        """A copy of all of them as bits, so that a NaN is equal to itself. [T · WIDTH]

        Args:
            spare: what an earlier call returned, and nobody needs any more: it may be written over.
        """
        if self._pieces is not None:
            if spare is None:
                spare = torch.empty(len(self.views) * WIDTH, dtype=_BITS[self.views[0].element_size()], device="cpu")
            if self._pieces.read(spare.data_ptr()):
                return spare
        with torch.no_grad():
            copy = torch.cat(self.views)
        return copy.view(_BITS[copy.element_size()])

    def are(self, values: Tensor) -> bool:
        """Whether they have the very bits that `read` returned; False where that takes more than one call."""
        return self._pieces is not None and self._pieces.first_other(values.data_ptr()) == len(self.views)


def readable(x: Any) -> Tensor | None:
    """This rank's part of a tensor of floats that is wide enough and lies in one piece; None for any other."""
    local = getattr(x, "_local_tensor", x)
    if type(local) not in (Tensor, nn.Parameter) or not local.is_floating_point() or local.numel() < WIDTH:
        return None
    return local if local.layout == torch.strided and local.is_contiguous() and local.element_size() > 1 else None


def _part(x: Tensor, offset: int) -> Tensor:
    """WIDTH neighbouring elements; the next ones by the golden section further on, so that of a large tensor, as queries, keys and values
    in one, each part is met within a few turns. [WIDTH]"""
    start = int(offset // WIDTH * GOLDEN % 1.0 * (x.numel() - WIDTH + 1))
    return x.view(-1)[start : start + WIDTH]


def _pieces(views: Sequence[Tensor]) -> Pieces | None:
    """Where bytes are to be read that are what torch would copy; None where torch is needed."""
    if not views or len({view.dtype for view in views}) > 1 or any(not view.is_cpu or view.is_neg() for view in views):
        return None
    addresses = [view.data_ptr() for view in views]
    return Pieces(addresses, WIDTH * views[0].element_size()) if all(addresses) else None
