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
from fp8watch_agent.record import (
    FIELDS,
    NUM_AMAX_BUCKETS,
    Measured,
    TileFlag,
)

from fp8watch.formats import AMAX_BUCKET_OFFSET

INF = float("inf")
_AMAX_BUCKET_SHIFT = 128 - AMAX_BUCKET_OFFSET  # exponent field of amax/1.75, rounded down, minus this = bucket
_LIGHT = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
_HEAVY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH


class Sections(NamedTuple):
    """One call as the sections of a slab row: consecutive FIELDS of one dtype and one way of merging."""

    energies: torch.Tensor | None  # float64 [5]: signal_energy … moment4
    noise_max: torch.Tensor | None  # float64 [1]
    counts: torch.Tensor  # int64 [6] or [38]: num_elements … num_inf, and depth_hist when it was measured
    tiles: torch.Tensor  # int32 [70]: num_tiles … num_calls, amax_hist
    maxima: torch.Tensor  # float32 [3]: amax, scale_inv, scale_ratio
    minima: torch.Tensor  # float32 [3]
    worst_tile: torch.Tensor  # int32 [2]
    noise_tile: torch.Tensor | None  # int32 [2]
    firsts: torch.Tensor  # int32 [4]: off_scale_tile, first_nonfinite without its call
    measured: int


@dataclass(frozen=True)
class Heavy:
    """The statistics that cost a second look at the elements. Per tile, float64 [Mt, Kt], but for the histogram."""

    signal_energy: torch.Tensor  # Σ x², finite x
    noise_energy: torch.Tensor  # Σ (x − dequantised x)², both finite
    noise_ratio: torch.Tensor  # noise / signal, 0 where there is no signal
    moment2: torch.Tensor  # Σ (x/amax)²
    moment4: torch.Tensor
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
    in_invariant: torch.Tensor  # bool: tiles that the scale invariant is about, with a usable scale
    off_scale: torch.Tensor  # bool
    off_scale_badness: torch.Tensor  # float32: how far outside, 0 for tiles that are not off-scale
    counts: torch.Tensor  # int64 [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf
    first_nonfinite: torch.Tensor  # int32 [2]: row and column of the first NaN or Inf in row-major order, else −1
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
        constants = _constants(*self.shape, *self.tile_shape, self.amax.device)
        counts = torch.cat((constants.num_elements, self.counts.sum((1, 2))))
        zero = self.amax == 0
        clamped = (self.amax < self.eps) & ~zero
        tiles = torch.stack((zero, clamped, self.amax == INF, self.off_scale)).sum((1, 2), dtype=torch.int32)
        buckets = ((self.amax.view(torch.int32) + (1 << 21)) >> 23).sub_(_AMAX_BUCKET_SHIFT).clamp_(1, 63)
        amax_hist = histogram(buckets.masked_fill_(zero, 0), NUM_AMAX_BUCKETS)
        maxima = torch.stack((self.amax, self.scale_inv, self.scale_ratio.where(self.in_invariant, constants.zero)))
        minima = torch.stack(
            (
                self.amax.masked_fill(zero, INF),
                self.scale_inv,
                self.scale_ratio.where(self.in_invariant, constants.infinity),
            )
        )
        largest = maxima.amax((1, 2))
        worst = self._place(self.amax, largest[0])
        off = self._place(self.off_scale_badness, self.off_scale_badness.amax())
        heavy = self.heavy
        energies = noise_max = noise_tile = None
        if heavy is not None:
            energies = torch.stack(
                (heavy.signal_energy, heavy.noise_energy, heavy.noise_ratio, heavy.moment2, heavy.moment4)
            ).sum((1, 2))
            noise_max = heavy.noise_ratio.amax().view(1)
            noise_tile = self._place(heavy.noise_ratio, noise_max)
            counts = torch.cat((counts, heavy.depth_hist))
        return Sections(
            energies,
            noise_max,
            counts,
            torch.cat((constants.num_tiles, tiles, constants.one_call, amax_hist)),
            largest,
            minima.amin((1, 2)),
            worst,
            noise_tile,
            torch.cat((off, self.first_nonfinite)),
            self.measured,
        )

    def _place(self, values: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
        """(row, column) of the first maximum, or (−1, −1) when the maximum is 0: int32 [2]."""
        index = values.argmax()
        columns = values.shape[1]
        place = torch.stack((index.div(columns, rounding_mode="floor"), index.remainder(columns)))
        return place.masked_fill_(maximum == 0, -1).to(torch.int32)

    def summary(self) -> dict[str, Any]:
        """The sketch of this one call: every field of the record by name, as Python numbers and numpy arrays.

        Reads the device. Groups of fields that were not measured are at their defaults; see "measured".
        """
        from fp8watch.slab import Slab

        slab = Slab(1, self.amax.device)
        slab.accumulate(0, self, 0)
        row = slab.copy_rows()[0]
        return {f.name: row[f.name].item() if f.size == 1 else np.array(row[f.name]) for f in FIELDS}


class _Constants(NamedTuple):
    num_elements: torch.Tensor
    num_tiles: torch.Tensor
    one_call: torch.Tensor
    zero: torch.Tensor
    infinity: torch.Tensor


@lru_cache(maxsize=4096)
def _constants(rows: int, columns: int, bm: int, bk: int, device: torch.device) -> _Constants:
    """Numbers that the shape alone decides, made once and kept on the device."""
    num_tiles = -(-rows // bm) * -(-columns // bk)
    return _Constants(
        torch.tensor([rows * columns], dtype=torch.int64, device=device),
        torch.tensor([num_tiles], dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        torch.zeros((), device=device),
        torch.full((), INF, device=device),
    )


def histogram(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Count int32 buckets 0 … num_buckets − 1, without reading the device: [num_buckets] of int64."""
    flat = buckets.view(-1)
    if flat.is_cpu:
        return torch.bincount(flat, minlength=num_buckets)
    # bincount reads the maximum back to the host on other devices
    counts = torch.zeros(num_buckets, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
