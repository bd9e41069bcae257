"""What other formats would do to an operand, told from its stored sketch: octaves below the amax of a tile, and amax by tile.

Shapes:     depth_hist [32], amax_hist [64] -> share of elements that become zero, tile SQNR
Thread:     any

An element at depth d, |x| = amax·2^-d, becomes zero where it lies at or below half of the smallest subnormal number of the format:
where d ≥ log2(ratio · largest / half the smallest), with ratio = amax·scale/FP8_MAX: 1 for FP32 scales, above 0.5 for powers of
two. A bucket holds an octave, so the share lies between two sums of buckets; the estimate spreads a bucket evenly.

    tile of the format      what the sketch tells
    the site's own          bounds and an estimate
    within the site's own   at most what the site's tile would give: an element is less deep below a smaller amax
    (NVFP4 is left out: its E4M3 scales of blocks hang on the amax of the tensor)
    the whole tensor        at least what the tile gives; an estimate, as if depth and amax of a tile were independent
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import NUM_AMAX_BUCKETS, NUM_DEPTH_BUCKETS

Array = npt.NDArray[np.float64]
_PARTS = 16  # of an octave, over which scales and depths are averaged


@dataclass(frozen=True)
class SketchFormat:
    """A format as far as a sketch can judge it."""

    name: str
    largest: float
    min_subnormal: float
    mantissa_bits: int
    power_2_scale: bool
    tile: str  # "own", "within" or "tensor"

    @property
    def depth(self) -> float:
        """Octaves from the largest number down to half of the smallest."""
        return math.log2(self.largest / (self.min_subnormal / 2))


def _formats() -> tuple[SketchFormat, ...]:
    e4m3, e5m2 = (448.0, 2.0**-9, 3), (57344.0, 2.0**-16, 2)
    return (
        SketchFormat("E4M3, power-of-two scales", *e4m3, True, "own"),
        SketchFormat("E4M3, FP32 scales", *e4m3, False, "own"),
        SketchFormat("E5M2, power-of-two scales", *e5m2, True, "own"),
        SketchFormat("E4M3, one scale a tensor", *e4m3, False, "tensor"),
        SketchFormat("E5M2, one scale a tensor", *e5m2, False, "tensor"),
        SketchFormat("MXFP8, 1×32", *e4m3, True, "within"),
    )


FORMATS = _formats()


@dataclass(frozen=True)
class SketchCost:
    """What one format would do; None is what the sketch does not tell."""

    format: str
    underflow: float | None  # share of non-zero elements, estimated
    underflow_min: float | None
    underflow_max: float | None
    tile_sqnr_db: float | None  # estimated; only where tiles are the site's own


def sketch_costs(
    depth_hist: Sequence[int], amax_hist: Sequence[int] | None = None, formats: Sequence[SketchFormat] = FORMATS
) -> tuple[SketchCost, ...]:
    """What each format would do to the elements that a sketch counted; empty for a sketch without elements.

    Args:
        depth_hist: counts by octave of log2(tile amax / |x|); the last bucket holds all that lies deeper.
        amax_hist: counts of tiles by octave of their amax, for formats with one scale a tensor; None: not known.
        formats: what is asked.

    Raises:
        ValueError: a histogram of another length.
    """
    depth = np.asarray(depth_hist, dtype=np.float64)
    if depth.shape != (NUM_DEPTH_BUCKETS,):
        raise ValueError(f"depth_hist has shape {depth.shape}: must be ({NUM_DEPTH_BUCKETS},)")
    tiles = None if amax_hist is None else np.asarray(amax_hist, dtype=np.float64)
    if tiles is not None and tiles.shape != (NUM_AMAX_BUCKETS,):
        raise ValueError(f"amax_hist has shape {tiles.shape}: must be ({NUM_AMAX_BUCKETS},)")
    if not depth.sum():
        return ()
    return tuple(_cost(f, depth / depth.sum(), tiles) for f in formats)


def _cost(f: SketchFormat, share: Array, tiles: Array | None) -> SketchCost:
    low, high = _bounds(f, share)
    if f.tile == "within":
        return SketchCost(f.name, None, None, high, None)
    if f.tile == "own":
        return SketchCost(f.name, _estimate(f, share, 0.0), low, high, _sqnr_db(f, share))
    if tiles is None or not tiles[1:].sum():
        return SketchCost(f.name, None, low, None, None)
    known = np.flatnonzero(tiles[1:]) + 1
    of_tile = tiles[known] / tiles[known].sum()
    below = known[-1] - known  # octaves of a tile's amax below the tensor's
    parts = [_estimate(f, share, float(octaves)) for octaves in below]
    known_parts = [part for part in parts if part is not None]
    estimate = float(of_tile @ np.array(known_parts)) if len(known_parts) == len(parts) else None
    return SketchCost(f.name, estimate, low, None, None)


def _bounds(f: SketchFormat, share: Array) -> tuple[float, float]:
    """Of the share that becomes zero with tiles of the site's own."""
    shallow = f.depth - (1.0 if f.power_2_scale else 0.0)
    first_sure, first_possible = math.ceil(f.depth), math.floor(shallow)
    low = float(share[first_sure:].sum()) if first_sure < NUM_DEPTH_BUCKETS else 0.0
    return low, float(share[min(first_possible, NUM_DEPTH_BUCKETS - 1) :].sum())


def _ratios(f: SketchFormat) -> Array:
    """log2 of amax·scale/FP8_MAX, spread over what it may be."""
    return -(np.arange(_PARTS) + 0.5) / _PARTS if f.power_2_scale else np.zeros(1)


def _estimate(f: SketchFormat, share: Array, octaves: float) -> float | None:
    """Share that becomes zero where the scale is that of an amax so many octaves above the tile's; None where that hangs on
    how deep the elements of the last bucket lie."""
    if f.depth - octaves > NUM_DEPTH_BUCKETS - 1 and share[-1]:
        return None
    edges = np.arange(NUM_DEPTH_BUCKETS, dtype=np.float64)
    found = 0.0
    ratios = _ratios(f)
    for ratio in ratios:
        beyond = np.clip(edges + 1 - (f.depth + ratio - octaves), 0.0, 1.0)
        found += float((share * beyond).sum())
    return found / len(ratios)


def _sqnr_db(f: SketchFormat, share: Array) -> float | None:
    """Noise over signal of a tile with these shares, in units of its amax."""
    fine = (np.arange(_PARTS) + 0.5) / _PARTS
    depth = (np.arange(NUM_DEPTH_BUCKETS)[:, None] + fine).ravel()
    weight = np.repeat(share / _PARTS, _PARTS)
    signal = float((weight * 4.0**-depth).sum())
    if not signal:
        return None
    noises = []
    for ratio in _ratios(f):
        x = f.largest * 2.0 ** (ratio - depth)  # as it is cast
        step = np.maximum(2.0 ** (np.floor(np.log2(x)) - f.mantissa_bits), f.min_subnormal)
        noise = np.where(x <= f.min_subnormal / 2, x**2, step**2 / 12)
        noises.append(float((weight * noise).sum()) / (f.largest * 2.0**ratio) ** 2)
    return 10 * math.log10(signal / (sum(noises) / len(noises)))
