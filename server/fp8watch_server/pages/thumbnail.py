"""A tile map as a small picture: what broke looks the same from run to run, or it does not.

Shapes:     a tile map -> SVG of at most ROWS × COLUMNS cells unless told otherwise, the largest amax of each, non-finite tiles marked
Thread:     worker threads of the server
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8watch_agent.record import TileFlag, TileMap
from fp8watch_server.store.tile_maps import amax_of

ROWS, COLUMNS, CELL = 24, 48, 2
MAX_PATHS = 64
RAMP = ("#2b1a4f", "#3b3f86", "#31678d", "#238b8d", "#35b179", "#90d743", "#fde725")
"""As `--map-0` … of static/fp8watch.css in the dark theme."""
ZERO, BROKEN = "#232b34", "#ff7a45"
INF = 0x7F80
"""Of bfloat16, whose bits without a sign are in the order of what they mean."""
BAD = int(TileFlag.NAN | TileFlag.INF | TileFlag.SENTINEL | TileFlag.OFF_SCALE)


def thumbnail(tiles: TileMap, at_most: tuple[int, int] = (ROWS, COLUMNS)) -> str:
    """The picture, longer side across, of at most so many rows and columns."""
    rows, columns = tiles.shape
    bad = (tiles.flags.reshape(rows, columns) & BAD) != 0
    finite = np.where(tiles.amax < INF, tiles.amax, 0).reshape(rows, columns)
    if rows > columns:
        finite, bad = finite.T, bad.T
    broken = _pool(bad, at_most)
    with np.errstate(divide="ignore"):
        level = np.log2(amax_of(_pool(finite, at_most)).astype(np.float64))
    known = level[np.isfinite(level)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    step = np.where(np.isfinite(level), (level - low) / max(high - low, 1e-9) * (len(RAMP) - 1), -1)
    colour = np.where(broken, len(RAMP), np.rint(step)).astype(int)
    height, width = colour.shape
    paths = []
    for k in np.unique(colour):
        at = zip(*np.nonzero(colour == k), strict=True)
        cells = "".join(f"M{x * CELL} {y * CELL}h{CELL}v{CELL}h-{CELL}z" for y, x in at)
        fill = BROKEN if k == len(RAMP) else ZERO if k < 0 else RAMP[k]
        paths.append(f'<path fill="{fill}" d="{cells}"/>')
    for y, x in zip(*np.nonzero(broken), strict=True):  # one cell is a pixel: a frame around it is seen
        paths.append(
            f'<path fill="none" stroke="{BROKEN}" d="M{x * CELL - 2} {y * CELL - 2}h{CELL + 4}v{CELL + 4}h-{CELL + 4}z"/>'
        )
    paths = paths[:MAX_PATHS]
    box = f"0 0 {width * CELL} {height * CELL}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" preserveAspectRatio="none" shape-rendering="crispEdges">'
    return f"{head}{''.join(paths)}</svg>"


def _pool(values: Any, at_most: tuple[int, int]) -> Any:
    """The largest of each part."""
    for axis, most in enumerate(at_most):
        n = values.shape[axis]
        if n > most:
            values = np.maximum.reduceat(values, np.linspace(0, n, most, endpoint=False).astype(int), axis=axis)
    return values
