"""Rows of an operand by expert: those that count, and each expert's rows padded to whole tiles as grouped kernels do.

Shapes:     x [S, K] sorted by expert, ends [E] -> [S', K], S' a sum of multiples of the tile     Thread: training, autograd's

Columnwise tiles of 128×1 are of one expert: a grouped wgrad pads the rows of each to whole tiles. Rows from `ends[-1]` on
belong to no expert, and hold whatever was in memory. On the CPU the ends are read; on a device nothing is: there S' is the
most that it may be, rows that are nobody's become zero, and what they add to the counts is taken off again. They leave one
trace there: the scale of an empty tile, 1, is among the extremes of scale_inv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Number = int | Tensor


class Frame(NamedTuple):
    """Rows as they are measured, and what of them is padding."""

    rows: Tensor  # [S', K]
    first_rows: Tensor  # int64 [E], of each expert
    num_padding: Number  # rows
    num_empty_tiles: Number  # tiles along the rows that are padding only; of rows of their own for a tile of one row
    sizes: Tensor | None = None  # int64 [E], rows of each expert without padding


@dataclass
class ExpertGroups:
    """Which rows are whose.

    Args:
        ends: integers [E], row after the last of each expert.
    """

    ends: Tensor

    @cached_property
    def _sizes(self) -> Tensor:
        ends = self.ends.long()
        return torch.diff(ends, prepend=ends.new_zeros(1))

    @cached_property
    def _num_valid(self) -> int | None:
        """Rows that belong to an expert, where that can be had without waiting for a device."""
        return int(self.ends[-1]) if self.ends.is_cpu and len(self.ends) else None if len(self.ends) else 0

    @cached_property
    def _first_rows(self) -> Tensor:
        return self.ends.long() - self._sizes

    def rowwise(self, x: Tensor) -> Frame:
        """The rows that belong to an expert: a view where that is known here, else a copy with zeros in the others."""
        if self._num_valid is not None:
            return Frame(x[: self._num_valid], self._first_rows, 0, 0, self._sizes)
        last = self.ends[-1]
        mine = torch.arange(x.shape[0], device=x.device) < last
        padding = x.shape[0] - last.long()
        return Frame(torch.where(mine.unsqueeze(1), x, 0), self._first_rows, padding, padding, self._sizes)

    def columnwise(self, x: Tensor, tile: int) -> Frame:
        """Each expert's rows padded with zeros to a multiple of the tile, one expert behind the other."""
        sizes, num_rows = self._sizes, x.shape[0]
        tiles = (sizes + (tile - 1)).div(tile, rounding_mode="floor")
        first_rows = (tiles.cumsum(0) - tiles) * tile
        if self._num_valid is not None:
            num_tiles, x = int(tiles.sum()), x[: self._num_valid]
            padding: Number = num_tiles * tile - self._num_valid
            empty: Number = 0
        else:
            num_tiles = num_rows // tile + min(
                len(sizes), num_rows
            )  # each expert has at most one tile that is not full
            empty = num_tiles - tiles.sum()
            padding = num_tiles * tile - self.ends[-1].long()
        rows = torch.arange(x.shape[0], device=x.device)
        expert = torch.searchsorted(self.ends.long(), rows, right=True)
        nobody = expert == len(sizes)
        expert = expert.clamp(max=len(sizes) - 1)
        to = first_rows[expert] + rows - self._first_rows[expert]
        out = x.new_zeros((num_tiles * tile + 1, x.shape[1]))
        out.index_copy_(0, to.masked_fill(nobody, num_tiles * tile), x)  # nobody's rows into one that is cut off
        return Frame(out[:-1], first_rows, padding, empty, sizes)

    def counted(self, y: Tensor) -> Tensor:
        """An output [S, N] without what belongs to no expert."""
        return self.rowwise(y).rows
