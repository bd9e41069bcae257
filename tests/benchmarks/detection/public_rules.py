"""Rules that people use today, scored beside the engine: on the loss, the gradient norm, and amax.

Each takes the scalars [T] and amax [T, S] of a run and gives the steps at which it would alarm. Sources: spike rules of
training frameworks (6 σ over a moving window), loss patience (a running minimum that is not reached for 2× its usual
time), ZClip (z-score of the gradient norm over an EMA, 2.5), a z-score of amax (4), amax above 10 × its history as in
delayed-scaling monitors, and mean-deviation turbulence (mean absolute deviation of the loss against its own EMA).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], list[int]]
WARM = 20


def spike_6_sigma(loss: np.ndarray, _norm: np.ndarray, _amax: np.ndarray) -> list[int]:
    out = []
    for t in range(WARM, len(loss)):
        past = loss[max(0, t - 100) : t]
        past = past[np.isfinite(past)]
        if len(past) < WARM:
            continue
        if not np.isfinite(loss[t]) or loss[t] > past.mean() + 6 * past.std():
            out.append(t)
    return out


def patience_2x(loss: np.ndarray, _norm: np.ndarray, _amax: np.ndarray) -> list[int]:
    """No new minimum of the smoothed loss for twice the longest wait so far (20 steps at least)."""
    out: list[int] = []
    best, last, longest, smooth = np.inf, 0, 20, loss[0]
    for t in range(1, len(loss)):
        if not np.isfinite(loss[t]):
            out.append(t)
            continue
        smooth = 0.9 * smooth + 0.1 * loss[t]
        if smooth < best:
            longest = max(longest, t - last) if t > 2 * WARM else longest
            best, last = smooth, t
        elif t - last > 2 * longest:
            out.append(t)
    return out


def zclip(_loss: np.ndarray, norm: np.ndarray, _amax: np.ndarray) -> list[int]:
    out = []
    mean, var = norm[:WARM].mean(), norm[:WARM].var()
    for t in range(WARM, len(norm)):
        if not np.isfinite(norm[t]):
            out.append(t)
            continue
        if norm[t] > mean + 2.5 * np.sqrt(var):
            out.append(t)
            continue
        mean, var = 0.97 * mean + 0.03 * norm[t], 0.97 * var + 0.03 * (norm[t] - mean) ** 2
    return out


def amax_z4(_loss: np.ndarray, _norm: np.ndarray, amax: np.ndarray) -> list[int]:
    with np.errstate(divide="ignore", invalid="ignore"):
        log2 = np.log2(amax)
    mean, var = np.nanmean(log2[:WARM], axis=0), np.nanvar(log2[:WARM], axis=0)
    out = []
    for t in range(WARM, len(log2)):
        now = log2[t]
        bad = np.isinf(now) | (np.abs(now - mean) > 4 * np.sqrt(var + 1e-6))
        if np.any(bad & ~np.isnan(now)):
            out.append(t)
        good = np.isfinite(now)
        mean = np.where(good, 0.97 * mean + 0.03 * np.where(good, now, 0), mean)
        var = np.where(good, 0.97 * var + 0.03 * (np.where(good, now, mean) - mean) ** 2, var)
    return out


def amax_10x(_loss: np.ndarray, _norm: np.ndarray, amax: np.ndarray) -> list[int]:
    out = []
    for t in range(WARM, len(amax)):
        past = np.nanmax(
            np.where(np.isfinite(amax[max(0, t - 16) : t]), amax[max(0, t - 16) : t], np.nan), axis=0, initial=0
        )
        with np.errstate(invalid="ignore"):
            if np.any(amax[t] > 10 * np.maximum(past, 1e-30)):
                out.append(t)
    return out


def turbulence(loss: np.ndarray, _norm: np.ndarray, _amax: np.ndarray) -> list[int]:
    """Mean absolute deviation over 16 steps above 3 × its own long-term value."""
    out = []
    ema, usual = loss[0], 0.0
    deviations: list[float] = []
    for t in range(1, len(loss)):
        if not np.isfinite(loss[t]):
            out.append(t)
            continue
        deviations = [*deviations, abs(loss[t] - ema)][-16:]
        ema = 0.95 * ema + 0.05 * loss[t]
        now = float(np.mean(deviations))
        if t > 3 * WARM and now > 3 * usual:
            out.append(t)
            continue
        usual = now if usual == 0 else 0.99 * usual + 0.01 * now
    return out


RULES: dict[str, Rule] = {
    "loss spike 6σ": spike_6_sigma,
    "2× patience": patience_2x,
    "ZClip (grad norm)": zclip,
    "amax z > 4": amax_z4,
    "amax > 10× history": amax_10x,
    "turbulence": turbulence,
}


def episodes(steps: list[int], apart: int = 20) -> list[int]:
    """First steps of alarms that are `apart` steps away from each other."""
    out: list[int] = []
    last = -(10**9)
    for t in steps:
        if t - last > apart:
            out.append(t)
        last = t
    return out
