"""What a backend leaves of one quantised operand, tile by tile, before it is summed up.

Shapes:     tensors [Mt, Kt], or one folded ROW     Thread: training

A backend in plain torch leaves a number per tile (`PerTile`), which `fold` sums up. A backend with a kernel of its own
folds while it quantises and hands over something that merges itself into a slab row (`Folded`). Nothing here
reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from fp8watch_agent.record import Measured

INF = float("inf")
LIGHT = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
HEAVY = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH


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
    gain: torch.Tensor | None = None  # float64, 0-d: gain_energy


class PerTile(NamedTuple):
    """What a backend in plain torch leaves. Tensors are [Mt, Kt]."""

    amax: torch.Tensor  # float32, NaN ignored, before eps; Inf where an element is
    scale: torch.Tensor  # float32
    scale_ratio: torch.Tensor  # float32: amax·scale/FP8_MAX
    invariant: Invariant | None  # None: every tile is included, has an amax above 0 and cannot be off-scale
    counts: torch.Tensor  # int64 [5, Mt, Kt]: non-zero, saturated, underflow, NaN, Inf
    first_nonfinite: torch.Tensor | None  # int32 [2]: row, column of the first NaN or Inf, else −1; None: all finite
    heavy: Heavy | None
    later: Mapping[str, torch.Tensor] = {}  # of the whole call, 0-d or [size]: fields with a group of their own


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


class Call(Protocol):
    """One quantisation, as folding needs it; `TileStats` is one."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the operand, M × K."""

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows × columns."""

    @property
    def eps(self) -> float:
        """Floor of the amax."""

    @property
    def scale_inv(self) -> torch.Tensor:
        """float32 [Mt, Kt]."""

    @property
    def amax(self) -> torch.Tensor:
        """float32 [Mt, Kt]."""

    @property
    def measured(self) -> int:
        """Bits of Measured."""

    @property
    def tiles(self) -> PerTile | None:
        """What a backend in plain torch left."""

    @property
    def folded(self) -> Folded | None:
        """What a backend with a kernel of its own left."""
