"""What is kept of three numbers of a light record that counts nothing wrong: fewer bits of fraction, inside their bounds.

Shapes:     columns [n] of a batch's records -> the same, with `scale_ratio_min`, `scale_ratio_max` and `amax_min_nonzero`
            rounded where they may be
Thread:     compactor, query pool; pure

In float32 their fractions are noise that nothing compresses. Detectors see a batch before it comes here, and their evidence
keeps every bit. A record that counts anything wrong keeps every bit, and so does one with full statistics, as a burst has
them around a jump.

Both bounds that a scale is held against stay where they were. A ratio between 0.5 and 1 stays above 0.5 and does not exceed 1;
one outside is left alone. The smallest amax keeps its side of FP8_MAX·2^k, where its scale changes, and does not exceed the
largest. Hot batches and sheets are both read through here, and rounding twice changes nothing, so answers do not depend on
what has been compacted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import QUANTISER_FAULTS, Measured

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp] | slice

RATIO_BITS, AMAX_BITS = 8, 11
"""Bits of fraction that are kept. A bfloat16 has 7, so an amax of bfloat16 is not changed."""

WITHIN: dict[str, float] = {
    "scale_ratio_max": 2.0 ** -(RATIO_BITS + 1),
    "scale_ratio_min": 2.0 ** -(RATIO_BITS + 1),
    "amax_min_nonzero": 2.0**-AMAX_BITS,
}
"""Columns that are rounded, and the largest relative error."""

WRONG = (
    "num_nan",
    "num_inf",
    "num_saturated",
    "num_sentinel_tiles",
    "num_eps_tiles",
    "num_off_scale_tiles",
    "output_num_nonfinite",
    "num_nonfinite_outputs",
    *QUANTISER_FAULTS,
)
"""Counts of which a record in order has none."""

_FULL = int(Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH)
_FRACTION = np.uint32(0x7FFFFF)
_TURNS = (np.uint32(0x400000), np.uint32(0x600000))
"""Fractions of FP8_MAX: 6 = 1.5·2^2; 448 and 57344 are 1.75·2^8 and 1.75·2^15."""
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


def round_light(columns: dict[str, Array], sent: Mapping[str, Array], index: Index) -> None:
    """Round in `columns` what light records in order have.

    Args:
        columns: some columns of some records of a batch; those that are rounded become new arrays.
        sent: all columns of the batch that are not at their default.
        index: places of the records in the batch.
    """
    asked = [name for name in WITHIN if name in columns and name in sent]
    if not asked:
        return
    may = _in_order(sent, index)
    if may is not None and not may.any():
        return
    for name in asked:
        values = columns[name]
        if name == "amax_min_nonzero":
            largest = sent.get("amax_max")
            if largest is None:
                continue
            rounded = round_smallest(values, largest[index])
        else:
            rounded = round_ratio(values)
        columns[name] = rounded if may is None else np.where(may, rounded, values)


def _in_order(sent: Mapping[str, Array], index: Index) -> npt.NDArray[np.bool_] | None:
    """Which records are light and count nothing wrong; None: all are."""
    may: npt.NDArray[np.bool_] | None = None
    for name in ("measured", *WRONG):
        values = sent.get(name)
        if values is None:
            continue
        fine = (values[index] & _FULL) == 0 if name == "measured" else values[index] == 0
        may = fine if may is None else may & fine
    return None if may is None or bool(may.all()) else may


def round_ratio(ratios: Array) -> Array:
    """Ratios between 0.5 and 1 to the nearest multiple of 2^-9, and never to 0.5; others as they are. float32 [n]"""
    step = np.float32(2.0 ** -(RATIO_BITS + 1))
    lowest = np.float32(0.5) + step / 2
    inside = (ratios > np.float32(0.5)) & (ratios < np.float32(1))
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.where(ratios <= lowest, lowest, np.rint(ratios / step) * step)
    return np.where(inside, rounded, ratios).astype(np.float32, copy=False)


def round_smallest(amax: Array, largest: Array) -> Array:
    """Down to AMAX_BITS of fraction; up, but not above `largest`, where that would be another scale. float32 [n]

    What is not a normal positive number, or above the largest, stays as it is.
    """
    words = np.ascontiguousarray(amax, dtype="<f4").view("<u4")
    cell = np.uint32(1 << (23 - AMAX_BITS))
    down = words & ~(cell - np.uint32(1))
    fraction = down & _FRACTION
    turned = (down != words) & ((fraction == _TURNS[0]) | (fraction == _TURNS[1]))
    with np.errstate(invalid="ignore"):
        usable = np.isfinite(amax) & (amax >= _SMALLEST_NORMAL) & (amax <= largest)
        rounded = down.view("<f4")
        if turned.any():
            rounded = np.where(turned, np.minimum((down + cell).view("<f4"), largest), rounded)
    return np.where(usable, rounded, amax).astype(np.float32, copy=False)
