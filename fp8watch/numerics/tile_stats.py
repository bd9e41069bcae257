"""Tile statistics of one quantised operand, as a backend hands them to the slab.

Shapes:     tensors [Mt, Kt], or one folded ROW     Thread: training

Nothing here reads a value back to the host: tensors stay on their device until `summary` is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fp8watch.numerics.per_tile import HEAVY, INF, LIGHT, Folded, Heavy, Invariant, PerTile
from fp8watch.numerics.row_fold import merge_call, new_rows
from fp8watch_agent.record import FIELDS, ROW, TileFlag

__all__ = ["HEAVY", "INF", "LIGHT", "Folded", "Heavy", "Invariant", "PerTile", "TileStats"]

_PLAIN_BYTES = 100  # a tile in plain torch: five int64 counts, five float64 sums, seven of 1–4 bytes


@dataclass(slots=True)
class TileStats:
    """What was seen while one operand was quantised. Tensors are [Mt, Kt] on the operand's device.

    Exactly one of `tiles` and `folded` is there.
    """

    shape: tuple[int, int]  # of the operand, M × K
    tile_shape: tuple[int, int]
    power_2_scale: bool
    eps: float
    scale_inv: torch.Tensor  # float32
    measured: int  # the groups of fields that this record holds, as bits of Measured
    tiles: PerTile | None = None
    folded: Folded | None = None

    @property
    def num_bytes(self) -> int:
        """What is kept of the tiles, about."""
        if self.folded is not None:
            return self.folded.num_bytes
        return self.scale_inv.numel() * _PLAIN_BYTES

    @property
    def amax(self) -> torch.Tensor:
        """float32 [Mt, Kt], NaN ignored, before eps; Inf where an element is."""
        if self.folded is not None:
            return self.folded.amax
        assert self.tiles is not None
        return self.tiles.amax

    @property
    def counts(self) -> torch.Tensor:
        """Integers [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf. As narrow as the backend made them."""
        if self.folded is not None:
            return self.folded.counts
        assert self.tiles is not None
        return self.tiles.counts

    @property
    def num_nonzero(self) -> torch.Tensor:
        """x ≠ 0 per tile."""
        return self.counts[0]

    @property
    def num_saturated(self) -> torch.Tensor:
        """Real clips per tile."""
        return self.counts[1]

    @property
    def num_underflow(self) -> torch.Tensor:
        """x ≠ 0 that became 0, per tile."""
        return self.counts[2]

    @property
    def num_nan(self) -> torch.Tensor:
        """NaN before the cast, per tile."""
        return self.counts[3]

    @property
    def num_inf(self) -> torch.Tensor:
        """±Inf before the cast, per tile."""
        return self.counts[4]

    @property
    def num_nonfinite(self) -> torch.Tensor:
        """NaN and ±Inf before the cast, per tile. Both together are no more than the tile has elements."""
        return self.counts[3] + self.counts[4]

    @property
    def off_scale(self) -> torch.Tensor:
        """Tiles that break the scale invariant: bool."""
        if self.folded is not None:
            return (self.folded.flags & int(TileFlag.OFF_SCALE)) != 0
        assert self.tiles is not None
        if self.tiles.invariant is None:
            return torch.zeros_like(self.amax, dtype=torch.bool)
        return self.tiles.invariant.off_scale

    def flags(self) -> torch.Tensor:
        """TileFlag bits of each tile: uint8 [Mt, Kt]."""
        if self.folded is not None:
            return self.folded.flags
        marks = {
            TileFlag.NAN: self.num_nan > 0,
            TileFlag.INF: self.num_inf > 0,
            TileFlag.SENTINEL: self.amax == INF,
            TileFlag.ZERO: self.amax == 0,
            TileFlag.EPS: (self.amax > 0) & (self.amax < self.eps),
            TileFlag.OFF_SCALE: self.off_scale,
            TileFlag.SATURATED: self.num_saturated > 0,
            TileFlag.UNDERFLOW: self.num_underflow > 0,
        }
        flags = torch.zeros_like(self.amax, dtype=torch.uint8)
        for flag, mark in marks.items():
            flags += mark * int(flag)
        return flags

    def summary(self) -> dict[str, Any]:
        """The sketch of this one call: every field of the record by name, as Python numbers and numpy arrays.

        Reads the device. Groups of fields that were not measured are at their defaults; see "measured".
        """
        rows = new_rows(1, self.amax.device)
        merge_call(rows, 0, self, 0)
        row = rows.cpu().numpy().reshape(-1).view(ROW)[0]
        return {f.name: row[f.name].item() if f.size == 1 else np.array(row[f.name]) for f in FIELDS}
