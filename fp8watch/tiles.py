"""Tile statistics of one call as the tile map that travels.

Upstream:   fp8watch.quantize          Downstream: fp8watch_agent.recorder
Shapes:     TileStats [Mt, Kt] -> TileMap [Mt·Kt]
Thread:     training, only for captured sites
"""

from __future__ import annotations

import numpy as np
import torch

from fp8watch_agent.record import TileMap

from .quantize.stats import TileStats


def tile_map_of(site: int, step: int, stats: TileStats) -> TileMap:
    """Every tile of one call. On a GPU this copies, so it is only called for sites that are captured."""
    rows, columns = stats.amax.shape

    def counts(t: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        return t.to(torch.int64).clamp(max=65535).cpu().numpy().astype(np.uint16).ravel()

    return TileMap(
        site=site,
        step=step,
        shape=(rows, columns),
        amax=stats.amax.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16).ravel(),
        scale_inv=stats.scale_inv.float().cpu().numpy().ravel(),
        flags=stats.flags().cpu().numpy().ravel(),
        num_nonfinite=counts(stats.num_nonfinite),
        num_underflow=counts(stats.num_underflow),
    )
