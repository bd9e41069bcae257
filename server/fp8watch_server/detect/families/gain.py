"""Gain of a quantiser: what it adds to the size of an operand, or takes from it. Modes 21 and 24.

Shapes:     sums of sites or records [n] -> gain error [n], and how far it may be off by chance [n]
Thread:     detect worker

gain error = Σ x·x̂ / Σ x² − 1. Rounding errors of both signs cancel, so it is near 0 whatever the SQNR; what is left adds
up over layers and steps, where noise averages out. Where a few elements own the energy their own rounding does not
cancel: of independent errors with relative size e the error of the sum is √(Σ (x²/Σx²)²·e²), at most
√(amax²/Σx² · noise/Σx²), which is computed here and not held against anybody. Nor do errors of rows that are alike cancel,
as those of padding are: an input of few columns may hold no more independent errors than one of its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.step_view import INPUT, StepView

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BY_CHANCE = 8.0
"""Times what independent errors may come to: values that come again, as a massive activation of each sequence does, are
rounded alike."""

ROUNDING = 10.0 ** (-31.5 / 20)
"""Relative error that E4M3 rounds an element by, as root mean square."""
ALIKE_SIGMA = 2.0
ALIKE_MOST = 3.0
"""Times the limit, at most, that an input of few columns may be off by: truncation is twice as far off."""

COARSER = 2.0
"""E5M2 has a step twice as large."""

ONE_SIZE = 0.65
"""Mean of (x / tile amax)², weighted with the energy, from which on values are of one size. Of values of which smaller ones are no rarer
than larger ones it is 3/5 at most, and 0.64 in tiles of 32."""
STEP = 1 / 8
"""Of E4M3, over the smallest value of an octave."""


def allowed(now: CrossRankStep, limit: float) -> Floats:
    """The limit of each site of a step: of inputs, what rounding does to one row of normal values if all rows are that one,
    where that is more. [S]"""
    alike = ALIKE_SIGMA * ROUNDING * np.sqrt(3.0 / np.maximum(now.table.num_columns, 1))
    return np.where(now.table.role == INPUT, np.clip(alike, limit, ALIKE_MOST * limit), limit)


def of_one_size(column: Callable[[str], Floats], e5m2: Mask) -> Floats:
    """What rounding to nearest may add to values of one size, or take from them; 0 where they are not, or it is not known. [n]

    Spread evenly over a width W, the errors of all whole steps cancel, and what is left at both ends is step²/8 each: step²/(4·W). W is
    1 − size or more, of values up to amax. At most it is half a step. Values of several sizes, each narrow, may be further off. Tiles
    that are not of one size have errors of their own, as those of which each has an owner.

    Args:
        column: a field of the operands, NaN where it was not measured.
        e5m2: of their formats. [n]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        step, size = np.where(e5m2, COARSER * STEP, STEP), column("moment4") / column("moment2")
        room = np.minimum(step**2 / 4 / np.maximum(1.0 - size, 0.0), step / 2 / (1.0 + step / 2))
        alike = column("amax_max") <= column("amax_min_nonzero") * (1.0 + step)
        tiles = column("num_tiles") - column("num_zero_tiles")
        room *= np.where(alike, 1.0, np.minimum(1.0, ALIKE_SIGMA / np.sqrt(tiles)))
        return np.where(size > ONE_SIZE, np.nan_to_num(room), 0.0)


def beyond(
    error: Floats,
    amax: Floats,
    signal: Floats,
    noise: Floats,
    e5m2: Mask,
    limit: float | Floats,
    room: float | Floats = 0.0,
) -> Mask:
    """Where a gain error is larger than the limit, than what chance explains and than the room that values of one size have; False where
    anything is not known. [n]"""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        chance = BY_CHANCE * np.sqrt(amax**2 / signal * (noise / signal))
        allowed = np.maximum(np.maximum(np.where(e5m2, COARSER * limit, limit), chance), room)
        return np.asarray(np.abs(error) > allowed)


def of_now(now: CrossRankStep) -> tuple[Floats, Floats, Floats]:
    """Gain error, signal and noise energy of the sites of a step, over those ranks that know the gain. [S] each"""
    group = Measured.GAIN
    signal, noise = now.beside("signal_energy", group), now.beside("noise_energy", group)
    with np.errstate(divide="ignore", invalid="ignore"):
        return now.column("gain_energy") / signal, signal, noise


def of_view(view: StepView) -> tuple[Floats, Floats, Floats]:
    """The same of the records of one rank. [n] each"""
    signal, noise = view.values("signal_energy"), view.values("noise_energy")
    with np.errstate(divide="ignore", invalid="ignore"):
        return view.values("gain_energy") / signal, signal, noise


def rescaled(view: StepView, limit: float) -> tuple[Mask, Mask]:
    """Records that come out beyond the limit of another size than they went in, and of these the larger ones: neither a clip nor an
    underflow makes them so, and the scale is read as another than the codes were made with. [n] each"""
    if not view.has(Measured.GAIN).any():
        return np.zeros(len(view), dtype=np.bool_), np.zeros(len(view), dtype=np.bool_)
    error, signal, noise = of_view(view)
    e5m2 = view.columns.table.e5m2[view.row]
    room = of_one_size(view.values, e5m2)
    off = beyond(error, view.values("amax_max"), signal, noise, e5m2, limit, room)
    return off, off & (error > 0)
