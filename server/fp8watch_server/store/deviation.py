"""How far a site is from its own past: what is usual there is not what is usual elsewhere.

Shapes:     values of sites over columns of steps [S, T] -> deviation [S, T], 1 at the edge of the band, NaN where unknown
Thread:     worker threads of the server; pure functions

The band is that of pages/static/baseline.js: the median of the 32 measurements before, ± 4σ (1.4826 × the median distance from
the median, and at least what is believed of an operand), which follows a slow drift here: only what lies beyond twice the
band does not feed it, until 32 in a row do. Amax of a weight walks, an optimizer step at a time: its band lies around the
measurement before, and σ is that of the 32 changes before. Around a median a weight that grows as all do would stand out for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WINDOW, LEAST, SIGMAS, MAD_TO_SIGMA = 32, 12, 4.0, 1.4826
FLOOR_OCTAVES = {"input": 0.12, "weight": 0.01, "grad_output": 0.5}
OTHER_FLOOR_OCTAVES = 0.12
FED_UP_TO = 2.0
"""Half-widths of the band: what drifts is not what broke."""
BAND = "the median of the site's 32 measurements before, ± 4σ"
WALK = "of amax of a weight, which walks, the one before, ± 4σ of its changes"
"""In words: what is usual, and what is where that goes on from the value before."""
FLOOR_DB = 0.25
OF = {"amax_deviation": "amax_max", "sqnr_deviation": "tile_sqnr_db"}
"""A map of deviations -> the field of the store that it is made of."""
MAX_CELLS = 400_000
LEAST_COLUMNS = 64


def floors(field: str, sites: Sequence[Mapping[str, Any]]) -> Floats:
    """Spread from step to step that is believed of each site, in what `levels` gives."""
    if field == "tile_sqnr_db":
        return np.full(len(sites), FLOOR_DB)
    return np.array([FLOOR_OCTAVES.get(s["operand"], OTHER_FLOOR_OCTAVES) for s in sites], dtype=np.float64)


def levels(field: str, values: Floats) -> Floats:
    """Values on the scale on which they scatter evenly: amax in octaves, SQNR in dB. NaN where there is none."""
    if field == "tile_sqnr_db":
        return np.where(np.isfinite(values), values, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(values) & (values > 0), np.log2(values), np.nan)


def walks(field: str, sites: Sequence[Mapping[str, Any]]) -> Flags:
    """Whose value goes on from the one before it, and does not scatter around a level."""
    return np.array([field == "amax_max" and s["operand"] == "weight" for s in sites], dtype=np.bool_)


def of_sites(field: str, values: Floats, sites: Sequence[Mapping[str, Any]]) -> Floats:
    """Deviations of a field of sites, [S, T] as it is stored."""
    return deviations(levels(field, values), floors(field, sites), walks(field, sites))


def deviations(level: Floats, floor: Floats, walking: Flags | None = None) -> Floats:
    """|value − middle| over the half-width of the band, column by column: the middle is the median of the values before, or
    the value before where a site walks.
    """
    num_sites, num_columns = level.shape
    walking = np.zeros(num_sites, dtype=np.bool_) if walking is None else walking
    before = np.full(num_sites, np.nan)
    past = np.full((num_sites, WINDOW), np.inf)  # sorted to the end where there is nothing
    num_past, at, outside = (np.zeros(num_sites, dtype=np.int64) for _ in range(3))
    out = np.full(level.shape, np.nan)
    for j in range(num_columns):
        y = level[:, j]
        there, ready = ~np.isnan(y), num_past + walking >= LEAST  # 12 values are 11 changes
        if (there & ready).any():
            around = np.where(walking, 0.0, _median(past, num_past))
            spread = SIGMAS * np.maximum(floor, MAD_TO_SIGMA * _median(np.abs(past - around[:, None]), num_past))
            middle = np.where(walking, before, around)
            with np.errstate(invalid="ignore"):
                far = np.abs(y - middle) / spread
            out[there & ready, j] = far[there & ready]
        is_out = there & ready & (np.nan_to_num(out[:, j]) > FED_UP_TO)
        outside = np.where(is_out, outside + 1, np.where(there, 0, outside))
        anew = outside > WINDOW  # so many in a row are a new normal
        past[anew], num_past[anew], at[anew], outside[anew], before[anew] = np.inf, 0, 0, 0, np.nan
        feeds = there & (~is_out | anew)
        change = y - before
        before = np.where(feeds, y, before)
        fed = np.flatnonzero(feeds & (~walking | ~np.isnan(change)))  # the first of a walk has come from nowhere
        past[fed, at[fed]] = np.where(walking, change, y)[fed]
        at[fed] = (at[fed] + 1) % WINDOW
        num_past[fed] = np.minimum(num_past[fed] + 1, WINDOW)
    return out


def _median(values: Floats, num: npt.NDArray[np.int64]) -> Floats:
    """Of the first `num` of each row in ascending order. What is absent is +Inf; a row without any gives 0."""
    ordered = np.sort(np.where(np.isnan(values), np.inf, values), axis=1)
    rows, low, high = np.arange(len(values)), np.maximum(num - 1, 0) // 2, num // 2
    found = (ordered[rows, low] + ordered[rows, np.minimum(high, WINDOW - 1)]) / 2
    return np.where(num > 0, found, 0.0)
