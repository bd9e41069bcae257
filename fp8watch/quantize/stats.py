"""Tile statistics of one quantised operand, as a backend hands them to the slab.

Upstream:   fp8watch.kernels.reference     Downstream: fp8watch.quantize.fold, fp8watch.slab
Shapes:     tensors [Mt, Kt], or one folded ROW     Thread: training

A backend in plain torch leaves a number per tile (`PerTile`), which `fold` sums up. A backend with a kernel of its own
folds while it quantises and hands over something that merges itself into a slab row (`Folded`). Nothing here
reads a value back to the host: tensors stay on their device until `summary` is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fp8watch_agent.record import FIELDS, Measured, TileFlag

INF = float("inf")
LIGHT = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
HEAVY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH
_PLAIN_BYTES = 100  # a tile in plain torch: five int64 counts, five float64 sums, seven of 1–4 bytes


class Invariant(NamedTuple):
    """The scale invariant, tile by tile: [Mt, Kt]."""

    included: torch.Tensor  # bool: tiles that it is about: not zero, sentinel or clamped, and with a usable scale
    off_scale: torch.Tensor  # bool: tiles that break it, or whose scale is not finite and positive
    badness: torch.Tensor  # float32: how far outside; 0 for tiles that are not off-scale


@dataclass(frozen=True)
class Heavy:
    """The statistics that cost a second look at the elements."""

    sums: torch.Tensor  # float64 [5]: signal_energy … moment4
    noise_ratio: torch.Tensor  # float64 [Mt, Kt]: noise / signal energy of a tile, 0 where there is no signal
    depth_hist: torch.Tensor  # int64 [32]


class PerTile(NamedTuple):
    """What a backend in plain torch leaves. Tensors are [Mt, Kt]."""

    amax: torch.Tensor  # float32, NaN ignored, before eps; Inf where an element is
    scale: torch.Tensor  # float32
    scale_ratio: torch.Tensor  # float32: amax·scale/FP8_MAX
    invariant: Invariant | None  # None: every tile is included, has an amax above 0 and cannot be off-scale
    counts: torch.Tensor  # int64 [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf
    first_nonfinite: torch.Tensor | None  # int32 [2]: row, column of the first NaN or Inf, else −1; None: all finite
    heavy: Heavy | None


class Folded(Protocol):
    """What a backend leaves that folds while it quantises."""

    @property
    def amax(self) -> torch.Tensor:
        """float32 [Mt, Kt]: NaN ignored, before eps; Inf where an element is."""

    @property
    def num_bytes(self) -> int:
        """What is kept of the tiles, about."""

    @property
    def counts(self) -> torch.Tensor:
        """Integers of any width [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf."""

    @property
    def flags(self) -> torch.Tensor:
        """TileFlag bits: uint8 [Mt, Kt]."""

    def merge_into(self, buffer: torch.Tensor, row: int, call_order: int) -> None:
        """Merge the call into `buffer[row]` (uint8 [capacity, ROW.itemsize]) as `fp8watch_agent.record.merge_rows` does.

        Where the row had none, `call_order` becomes its `order`, and the call of `first_nonfinite` if this one has a
        non-finite element.
        """

    def release(self) -> None:
        """Let go of what only merging needs. What the tiles say stays."""


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
        from fp8watch.slab import Slab

        slab = Slab(1, self.amax.device)
        slab.accumulate(0, self, 0)
        row = slab.copy_rows()[0]
        return {f.name: row[f.name].item() if f.size == 1 else np.array(row[f.name]) for f in FIELDS}
