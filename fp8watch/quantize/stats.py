"""Tile statistics of one quantised operand, and how they fold into the sections of a slab row.

Upstream:   fp8watch.kernels.reference     Downstream: fp8watch.slab
Shapes:     tensors [Mt, Kt] -> sections of one ROW     Thread: training

Nothing here reads a value back to the host: tensors stay on their device until `summary` or `flags` is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8watch.formats import AMAX_BUCKET_OFFSET
from fp8watch_agent.record import (
    FIELDS,
    NUM_AMAX_BUCKETS,
    Measured,
    TileFlag,
)

INF = float("inf")
_AMAX_BUCKET_SHIFT = 128 - AMAX_BUCKET_OFFSET  # exponent field of amax/1.75, rounded down, minus this = bucket
_LIGHT = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
_HEAVY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH


class Sections(NamedTuple):
    """One call as the sections of a slab row: consecutive FIELDS of one dtype and one way of merging."""

    sums: torch.Tensor | None  # float64 [5]: signal_energy … moment4
    noise_max: torch.Tensor | None  # float64 [1]
    counts: torch.Tensor  # int64 [6] or [38]: num_elements … num_inf, and depth_hist when it was measured
    tiles: torch.Tensor  # int32 [70]: num_tiles … num_calls, amax_hist
    maxima: torch.Tensor  # float32 [3]: amax, scale_inv, scale_ratio
    minima: torch.Tensor  # float32 [3]
    worst_tile: torch.Tensor  # int32 [2], of the largest amax even if that is 0
    noise_tile: torch.Tensor | None  # int32 [2], of the largest noise ratio even if that is 0
    firsts: torch.Tensor | None  # int32 [4]: off_scale_tile, first_nonfinite without its call; None: nowhere
    measured: int


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


@dataclass(frozen=True)
class TileStats:
    """What was seen while one operand was quantised. Tensors are [Mt, Kt] on the operand's device."""

    shape: tuple[int, int]  # of the operand, M × K
    tile_shape: tuple[int, int]
    power_2_scale: bool
    eps: float
    amax: torch.Tensor  # float32, NaN ignored, before eps; Inf where an element is
    scale: torch.Tensor  # float32
    scale_inv: torch.Tensor  # float32
    scale_ratio: torch.Tensor  # float32: amax·scale/FP8_MAX
    invariant: Invariant | None  # None: every tile is included, has an amax above 0 and cannot be off-scale
    counts: torch.Tensor  # int64 [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf
    first_nonfinite: torch.Tensor | None  # int32 [2]: row, column of the first NaN or Inf, else −1; None: all finite
    heavy: Heavy | None

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
        """NaN and ±Inf before the cast, per tile."""
        return self.counts[3] + self.counts[4]

    @property
    def off_scale(self) -> torch.Tensor:
        """Tiles that break the scale invariant: bool."""
        if self.invariant is None:
            return torch.zeros_like(self.amax, dtype=torch.bool)
        return self.invariant.off_scale

    @property
    def measured(self) -> int:
        """The groups of fields that this record holds, as bits of Measured."""
        return int(_LIGHT | _HEAVY) if self.heavy is not None else int(_LIGHT)

    def flags(self) -> torch.Tensor:
        """TileFlag bits of each tile: uint8 [Mt, Kt]."""
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

    def sections(self) -> Sections:
        """Fold the tiles into the sections of one slab row, on the device."""
        shared = _shared(*self.shape, *self.tile_shape, self.amax.device)
        bits = self.amax.view(torch.int32) + (1 << 21)  # carries into the exponent where the mantissa is 1.75 or more
        buckets = bits.bitwise_right_shift_(23).sub_(_AMAX_BUCKET_SHIFT).clamp_(1, NUM_AMAX_BUCKETS - 1)
        if self.invariant is None:
            low, high = torch.stack((self.amax, self.scale_inv, self.scale_ratio)).view(3, -1).aminmax(dim=1)
            tiles, off = shared.ordinary_tiles, shared.nowhere
        else:
            low, high, tiles, off = self._unusual(self.invariant, buckets, shared)
        counts = [shared.num_elements, self.counts.sum((1, 2))]
        sums = noise_max = noise_tile = None
        if self.heavy is not None:
            ratio = self.heavy.noise_ratio.view(-1)
            noise_max, index = ratio.max(0, keepdim=True)
            noise_tile = shared.places.index_select(0, index).view(2)
            sums = self.heavy.sums
            counts.append(self.heavy.depth_hist)
        firsts = None
        if self.invariant is not None or self.first_nonfinite is not None:
            firsts = torch.cat((off, shared.nowhere if self.first_nonfinite is None else self.first_nonfinite))
        return Sections(
            sums,
            noise_max,
            torch.cat(counts),
            torch.cat((tiles, histogram(buckets, NUM_AMAX_BUCKETS))),
            high,
            low,
            shared.places.index_select(0, self.amax.view(-1).argmax(keepdim=True)).view(2),
            noise_tile,
            firsts,
            self.measured,
        )

    def _unusual(
        self, invariant: Invariant, buckets: torch.Tensor, shared: _Shared
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sections that differ where tiles are zero, clamped, sentinel or off-scale; zero tiles to bucket 0."""
        zero = self.amax == 0
        buckets.masked_fill_(zero, 0)
        clamped = (self.amax < self.eps) & ~zero
        special = torch.stack((zero, clamped, self.amax == INF, invariant.off_scale))
        tiles = shared.ordinary_tiles.clone()
        tiles[1:5] = special.sum((1, 2))
        highest = torch.stack((self.amax, self.scale_inv, self.scale_ratio.where(invariant.included, 0.0)))
        lowest = torch.stack(
            (self.amax.masked_fill(zero, INF), self.scale_inv, self.scale_ratio.where(invariant.included, INF))
        )
        worst, index = invariant.badness.view(-1).max(0, keepdim=True)
        off = shared.places.index_select(0, index).view(2).masked_fill_(worst == 0, -1)
        return lowest.amin((1, 2)), highest.amax((1, 2)), tiles, off

    def summary(self) -> dict[str, Any]:
        """The sketch of this one call: every field of the record by name, as Python numbers and numpy arrays.

        Reads the device. Groups of fields that were not measured are at their defaults; see "measured".
        """
        from fp8watch.slab import Slab

        slab = Slab(1, self.amax.device)
        slab.accumulate(0, self, 0)
        row = slab.copy_rows()[0]
        return {f.name: row[f.name].item() if f.size == 1 else np.array(row[f.name]) for f in FIELDS}


class _Shared(NamedTuple):
    """What the shape alone decides, made once and kept on the device."""

    num_elements: torch.Tensor  # int64 [1]
    ordinary_tiles: torch.Tensor  # int32 [6]: num_tiles … num_calls of a call without any special tile
    nowhere: torch.Tensor  # int32 [2]: (−1, −1)
    places: torch.Tensor  # int32 [Mt·Kt, 2]: (row, column) of each tile


@lru_cache(maxsize=256)
def _shared(rows: int, columns: int, bm: int, bk: int, device: torch.device) -> _Shared:
    mt, kt = -(-rows // bm), -(-columns // bk)
    index = torch.arange(mt * kt, dtype=torch.int32)
    return _Shared(
        torch.tensor([rows * columns], dtype=torch.int64).to(device),
        torch.tensor([mt * kt, 0, 0, 0, 0, 1], dtype=torch.int32).to(device),
        torch.tensor([-1, -1], dtype=torch.int32).to(device),
        torch.stack((index // kt, index % kt), dim=1).to(device),
    )


def histogram(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Count int32 buckets 0 … num_buckets − 1, without reading the device: [num_buckets] of int64."""
    flat = buckets.view(-1)
    if flat.is_cpu:
        return torch.bincount(flat, minlength=num_buckets)
    # bincount reads the maximum back to the host on other devices
    counts = torch.zeros(num_buckets, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
