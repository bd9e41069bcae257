"""How the rows of an operand are laid out by expert.

Shapes:     number of a row -> number of an expert     Thread: training, autograd's
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Whole(NamedTuple):
    """All rows of a call belong to one expert."""

    expert: int


class Even(NamedTuple):
    """Each expert has as many rows, one behind the other."""

    rows_each: int


class Sorted(NamedTuple):
    """Rows are sorted by expert."""

    first_rows: Tensor  # int64 [E], of each expert in the operand as it was measured
    sizes: Tensor | None = None  # int64 [E], rows of each expert without padding


Layout = Whole | Even | Sorted


def experts_of(layout: Even | Sorted, rows: Tensor) -> Tensor:
    """The expert of each of these rows, on the device: int64, as many. Padding counts to the expert before it."""
    if isinstance(layout, Even):
        return rows.div(layout.rows_each, rounding_mode="floor")
    return torch.searchsorted(layout.first_rows, rows, right=True) - 1
