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


def allowed(now: CrossRankStep, limit: float) -> Floats:
    """The limit of each site of a step: of inputs, what rounding does to one row of normal values if all rows are that one,
    where that is more. [S]"""
    alike = ALIKE_SIGMA * ROUNDING * np.sqrt(3.0 / np.maximum(now.table.num_columns, 1))
    return np.where(now.table.role == INPUT, np.clip(alike, limit, ALIKE_MOST * limit), limit)


def beyond(error: Floats, amax: Floats, signal: Floats, noise: Floats, e5m2: Mask, limit: float | Floats) -> Mask:
    """Where a gain error is larger than the limit and than what chance explains; False where anything is not known. [n]"""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        chance = BY_CHANCE * np.sqrt(amax**2 / signal * (noise / signal))
        allowed = np.maximum(np.where(e5m2, COARSER * limit, limit), chance)
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


def larger(view: StepView, limit: float) -> Mask:
    """Records that come out larger than they went in, by more than rounding can do: neither a clip nor an underflow does
    that, so the scale is read as another than the codes were made with. [n]"""
    if not view.has(Measured.GAIN).any():
        return np.zeros(len(view), dtype=np.bool_)
    error, signal, noise = of_view(view)
    e5m2 = view.columns.table.e5m2[view.row]
    return (error > 0) & beyond(error, view.values("amax_max"), signal, noise, e5m2, limit)
