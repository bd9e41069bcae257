"""What each expert of a site saw in a step: amax, non-finite elements, underflow, tokens; on the device, out of the tiles.

Shapes:     tiles [Mt, Kt] of a call, whose rows are of experts -> [4, E] float64 a site     Thread: training, autograd's

A tile is of one expert, so nothing is read a second time. Sites of experts have turns: as many in a step as hold
`MAX_ENTRIES` experts together, whatever the model. One scale for a whole tensor has one tile, which is nobody's: there is
no vector then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.expert_layout import Layout, Sorted, Whole, experts_of
from fp8watch_agent.expert_vectors import VECTOR

MAX_ENTRIES = 1024
"""Experts of all sites in one step: 16 KiB before compression, at most one site more."""
NAMES = VECTOR.names or ()


class ExpertVectors:
    """Vectors of the running step.

    Args:
        num_experts: row of the slab -> how many.
    """

    def __init__(self, num_experts: Mapping[int, int]) -> None:
        self._num_experts, self._at = num_experts, 0
        self._found: dict[int, Tensor] = {}
        self.rows: tuple[int, ...] = ()  # that take part, one direction of an operand
        self.turn: frozenset[int] = frozenset()

    def cover(self, rows: tuple[int, ...]) -> None:
        """Give turns to these rows."""
        self.rows = rows
        self._next()

    def add(self, row: int, stats: TileStats, layout: Layout) -> None:
        """Merge one call."""
        num, tile_rows = self._num_experts[row], stats.tile_shape[0]
        amax, counts = stats.amax, stats.counts
        if not isinstance(layout, Whole) and num > 1 and tile_rows >= stats.shape[0]:
            return  # one tile for all of them
        out = torch.zeros((len(NAMES), num), dtype=torch.float64, device=amax.device)
        broken = (counts[3].long() + counts[4].long()).sum(1)
        tiles = torch.stack([amax.amax(1).double(), broken.double(), counts[2].long().sum(1).double()])
        if isinstance(layout, Whole):
            out[0, layout.expert] = tiles[0].amax()
            out[1:3, layout.expert] = tiles[1:].sum(1)
            out[3, layout.expert] = stats.shape[0]
        else:
            expert = experts_of(layout, torch.arange(amax.shape[0], device=amax.device) * tile_rows).clamp_(0, num - 1)
            out[0].scatter_reduce_(0, expert, tiles[0], "amax")
            out[1:3].index_add_(1, expert, tiles[1:])
            if isinstance(layout, Sorted) and layout.sizes is not None:
                out[3] = layout.sizes.double()
        before = self._found.get(row)
        if before is not None:
            out[0] = torch.maximum(out[0], before[0])
            out[1:] += before[1:]
        self._found[row] = out

    def take(self) -> tuple[list[int], Tensor | None]:
        """Rows that have a vector in this step, and these one behind the other; then the next have their turn."""
        rows, found = list(self._found), list(self._found.values())
        self._found = {}
        if self.rows:
            self._next()
        return rows, torch.cat([v.reshape(-1) for v in found]) if found else None

    def _next(self) -> None:
        turn: list[int] = []
        entries = 0
        while len(turn) < len(self.rows) and entries < MAX_ENTRIES:
            row = self.rows[self._at % len(self.rows)]
            self._at = (self._at + 1) % len(self.rows)
            entries += self._num_experts[row]
            turn.append(row)
        self.turn = frozenset(turn)

    def vectors(
        self, rows: list[int], flat: npt.NDArray[np.float64], site_ids: Sequence[int]
    ) -> dict[int, npt.NDArray[np.void]]:
        """Site -> VECTOR [E], of what has come to the host.

        Args:
            rows: as `take` gave them.
            flat: the tensor that came with them.
            site_ids: of each row of the slab.
        """
        out: dict[int, npt.NDArray[np.void]] = {}
        at = 0
        for row in rows:
            num = self._num_experts[row]
            of_row = flat[at : at + len(NAMES) * num].reshape(len(NAMES), num)
            at += of_row.size
            vector = np.zeros(num, dtype=VECTOR)
            for name, values in zip(NAMES, of_row, strict=True):
                most = np.inf if VECTOR[name].kind == "f" else float(np.iinfo(VECTOR[name]).max)
                vector[name] = np.minimum(values, most)
            out[site_ids[row]] = vector
        return out
