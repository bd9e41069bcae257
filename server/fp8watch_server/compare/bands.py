"""What two runs may be apart by chance: of their losses, and of each site's amax.

Shapes:     losses [T], log2 ratios [S, T] -> the half-width of a band, and how far beyond it a value is
Thread:     any; pure functions

A band follows from what lay before it, so that a run that has left it does not widen it. Scatter is 1.4826 × the median
distance from the median (of a normal distribution: σ). Of the difference of two losses the band is four times the scatter of
their own steps, √(σa² + σb²), and at least 0.25 % of the loss, which healthy FP8 and BF16 runs stay within at first. Where both
saw the same data, what the batches scatter cancels: it is four times the scatter of the difference, and at least 2 % and a
quarter of the other band, which twins wander apart by.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WINDOW, LEAST, SIGMAS, MAD_TO_SIGMA = 32, 12, 4.0, 1.4826
LOSS_FLOOR = 0.0025
TWINS_FLOOR = 0.02
"""Share of the loss by which two runs may be apart for long: trajectories of twins wander."""
TWINS_SHARE = 0.25
"""Of the band of two runs with other data, what those with the same are granted at least."""
DRIFT_SIGMAS = 5.0
SUSTAINED, WITHIN = 3, 4
"""A value is out for good when so many of so many measurements are: a single one may be by chance."""
DRIFTED = 16
"""Steps for which the median of the difference must be out."""
WIDE = {"input": 0.12, "output": 0.12, "weight": 0.02, "grad_output": 0.5}
"""Octaves by which amax scatters from step to step in healthy runs: other data are no parting."""
NARROW_SHARE = 1 / 6
"""Of these, what is believed where the origin of a parting is sought: twins see the same data."""
LASTING, AT_ONCE = 2.0, 4.0
"""Half-widths of a site's band beyond which it is a parting that lasts, and beyond which one measurement is enough: amax of
twins wanders too, where the losses do not show it. With other data it takes twice as much."""


def _scatter_before(values: Floats) -> Floats:
    """σ of the step-to-step change of a loss, of the WINDOW changes before each step; [T]."""
    change = np.abs(np.diff(values, prepend=values[:1]))
    change[0] = np.nan
    change[~np.isfinite(change)] = np.nan
    padded = np.concatenate([np.full(WINDOW, np.nan), change])[: len(change) + WINDOW - 1]
    views = np.lib.stride_tricks.sliding_window_view(padded, WINDOW) if len(change) else np.zeros((0, WINDOW))
    num = (~np.isnan(views)).sum(axis=1)
    sigma = np.full(len(change), np.nan)
    enough = num >= 8
    if enough.any():
        sigma[enough] = np.nanmedian(views[enough], axis=1) * MAD_TO_SIGMA / math.sqrt(2)
        first = int(np.flatnonzero(enough)[0])
        sigma[:first] = sigma[first]  # the first steps have none before them: those that follow say it
    return sigma


def loss_band(a: Floats, b: Floats, *, same_data: bool = False) -> Floats:
    """Half-width of the band of a − b. [T]; NaN where nothing is known.

    Args:
        a, b: losses at the same steps, NaN or ±Inf where they are.
        same_data: both saw the same batches.
    """
    sigma = np.sqrt(np.nan_to_num(_scatter_before(a)) ** 2 + np.nan_to_num(_scatter_before(b)) ** 2)
    level = np.fmin(np.where(np.isfinite(a), np.abs(a), np.nan), np.where(np.isfinite(b), np.abs(b), np.nan))
    band = np.asarray(np.maximum(SIGMAS * sigma, LOSS_FLOOR * level))
    if not same_data:
        return band
    with np.errstate(invalid="ignore"):
        own = np.nan_to_num(_scatter_before(a - b))
    least = np.maximum(TWINS_FLOOR * level, TWINS_SHARE * band)
    return np.asarray(np.minimum(band, np.maximum(SIGMAS * own, least)))


def first_lasting(out: Flags, at_once: Flags) -> int | None:
    """First place that is out for good: at once, or SUSTAINED of the WITHIN from there on."""
    n = len(out)
    if not n:
        return None
    padded = np.concatenate([out, np.zeros(WITHIN - 1, bool)])
    many = np.lib.stride_tricks.sliding_window_view(padded, WITHIN).sum(axis=1) >= SUSTAINED
    found = np.flatnonzero((out & many[:n]) | at_once)
    return int(found[0]) if len(found) else None


def drift(difference: Floats, level: Floats) -> int | None:
    """First step from which on the median difference of WINDOW steps stays out of what chance gives, None where it never does.

    The median of n values scatters by 1.2533·σ/√n.
    """
    n = len(difference)
    if n < WINDOW + DRIFTED:
        return None
    views = np.lib.stride_tricks.sliding_window_view(difference, WINDOW)
    middle = np.median(views, axis=1)
    sigma = MAD_TO_SIGMA * np.median(np.abs(views - middle[:, None]), axis=1)
    limit = np.maximum(DRIFT_SIGMAS * 1.2533 * sigma / math.sqrt(WINDOW), TWINS_FLOOR * np.abs(level[WINDOW - 1 :]))
    out = np.abs(middle) > limit
    stays = np.lib.stride_tricks.sliding_window_view(out, DRIFTED).all(axis=1)
    found = np.flatnonzero(stays)
    return int(found[0]) + WINDOW - 1 if len(found) else None


def beyond(ratio: Floats, floor: Floats, at_first: Floats | None = None) -> Floats:
    """How far each log2 ratio lies from what it was before, in half-widths of its band. [S, T]; NaN where it was not measured.

    Args:
        ratio: log2(amax of one side / amax of the other) [S, T].
        floor: octaves that are believed of each site [S].
        at_first: the same before LEAST measurements, when the ratio is expected to be 0; None: `floor`.
    """
    at_first = floor if at_first is None else at_first
    num_sites, num_steps = ratio.shape
    past = np.full((num_sites, WINDOW), np.inf)  # sorted to the end where there is nothing
    num, at = np.zeros(num_sites, np.int64), np.zeros(num_sites, np.int64)
    out = np.full(ratio.shape, np.nan)
    for j in range(num_steps):
        y = ratio[:, j]
        there = ~np.isnan(y)
        if not there.any():
            continue
        middle, spread = np.zeros(num_sites), at_first.copy()
        ready = np.flatnonzero(there & (num >= LEAST))
        if len(ready):
            middle[ready] = _median(past[ready], num[ready])
            far = _median(np.abs(past[ready] - middle[ready, None]), num[ready])
            spread[ready] = np.maximum(floor[ready], MAD_TO_SIGMA * far)
        out[there, j] = np.abs(y - middle)[there] / (SIGMAS * spread[there])
        fed = np.flatnonzero(there & (np.nan_to_num(out[:, j]) <= 1))  # what has left the band does not feed it
        past[fed, at[fed]] = y[fed]
        at[fed] = (at[fed] + 1) % WINDOW
        num[fed] = np.minimum(num[fed] + 1, WINDOW)
    return out


def jumps(ratio: Floats, floor: float) -> Floats:
    """For weights, whose amax walks with training: the largest change of the ratio so far, in half-widths of what such
    changes were before. [S, T]; NaN where it was not measured."""
    out = np.full(ratio.shape, np.nan)
    for row, into in zip(ratio, out, strict=True):
        at = np.flatnonzero(~np.isnan(row))
        if len(at):
            change = np.abs(np.diff(row[at], prepend=0.0))  # twins begin with a ratio of 1
            usual = _usual_before(change)
            into[at] = np.maximum.accumulate(change / (SIGMAS * np.maximum(floor, usual)))
    return out


def _usual_before(change: Floats) -> Floats:
    """σ of the WINDOW changes before each; 0 before the first. [N]"""
    padded = np.concatenate([np.zeros(WINDOW), change])[: len(change) + WINDOW - 1]
    return np.asarray(MAD_TO_SIGMA * np.median(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1))


def _median(values: Floats, num: npt.NDArray[np.int64]) -> Floats:
    """Of the `num` smallest of each row, of which there is one at least; the others are +Inf."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    return np.asarray((ordered[rows, (num - 1) // 2] + ordered[rows, np.minimum(num // 2, WINDOW - 1)]) / 2)
