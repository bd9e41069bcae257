"""Tile statistics of one call as the tile map that travels.

Shapes:     TileStats [Mt, Kt] -> TileMap [Mt·Kt]
Thread:     training, only for captured sites
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import TileMap


def tile_tensors(stats: TileStats) -> list[torch.Tensor]:
    """What `tile_map_from` reads, on the device of the statistics; reads nothing back."""

    def counts(t: torch.Tensor) -> torch.Tensor:
        return t.to(torch.int32).clamp(max=65535).reshape(stats.amax.shape)

    return [
        stats.amax.bfloat16().view(torch.int16),
        stats.scale_inv.float().reshape(stats.amax.shape),
        stats.flags(),
        counts(stats.num_nonfinite),
        counts(stats.num_underflow),
    ]


def tile_map_from(site: int, step: int, tensors: Sequence[torch.Tensor]) -> TileMap:
    """Every tile of one call, from the tensors of `tile_tensors` on the host. The arrays are its own."""
    amax, scale_inv, flags, num_nonfinite, num_underflow = (t.numpy() for t in tensors)
    rows, columns = amax.shape
    return TileMap(
        site=site,
        step=step,
        shape=(rows, columns),
        amax=amax.view(np.uint16).ravel().copy(),
        scale_inv=scale_inv.ravel().copy(),
        flags=flags.ravel().copy(),
        num_nonfinite=num_nonfinite.ravel().astype(np.uint16),
        num_underflow=num_underflow.ravel().astype(np.uint16),
    )
