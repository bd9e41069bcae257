"""Small elements that become 0 beside many that are not: of an input whose energy is spread that costs nothing.

Shapes:     energies, moments and scale ratios [S] -> [S, WIDTH]
Thread:     detect worker

With a scale of its own, an element becomes 0 where it is 2^18 times and more smaller than the largest of its tile (E4M3, a scale
rounded to a power of two; E5M2: 2^32). GELU and SiLU leave such values of what is negative. It is no loss where the largest
elements are no giants: by the energy, which is at least that of tiles with one element of the operand's amax in each and nothing else; and
by the kurtosis, which says that many elements of a tile hold it. An outlier that owns its tile has a healthy SQNR as well, and all of the
others may be lost.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep, Floats
from fp8watch_server.detect.finding import Evidence
from fp8watch_server.detect.step_view import INPUT

SPREAD_KURTOSIS = 16.0
"""One in so many elements, if not more, holds the energy. After GELU: 4 to 10. Tiles of 128 with an owner each: 128."""
OWN_SCALE = 0.5 - 2.0**-10
"""Least amax·scale/FP8_MAX of a scale of this very tile, rounded to a power of two: a smaller one wastes octaves, and flushes more."""


WIDTH = 4
"""What is kept of each site: amax over root mean square, kurtosis, tile SQNR in dB, the step."""


def spread(now: CrossRankStep, band: Floats, whole_db: Floats) -> Floats:
    """How the energy is spread of inputs that lose small elements alone: those with scales of their own, inside their band.
    NaN of all others, and where anything of it was not measured. [S, WIDTH]

    Args:
        now: the step.
        band: of the SQNR in dB, [S].
        whole_db: SQNR of the operand, [S].
    """
    table, found = now.table, np.full((len(now), WIDTH), np.nan)
    own = table.current_scaling & ~table.per_tensor & ~table.four_bit & (table.role == INPUT)
    amax, energy = now.column("amax_max"), now.column("signal_energy")
    num_elements, num_tiles = (now.beside(name, Measured.ENERGIES) for name in ("num_elements", "num_tiles"))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        no_giants = (amax**2 * num_tiles <= energy) & (now.log2_kurtosis <= math.log2(SPREAD_KURTOSIS))
        scaled = (now.column("scale_ratio_min") >= OWN_SCALE) & (now.column("num_eps_tiles") == 0)
        at = np.flatnonzero(own & no_giants & scaled & (now.sqnr_db >= band) & (whole_db >= band))
        found[at, 0] = (amax / np.sqrt(energy / num_elements))[at]
    found[at, 1], found[at, 2], found[at, 3] = np.exp2(now.log2_kurtosis[at]), now.sqnr_db[at], now.step
    return found


def evidence(spread: Floats) -> list[Evidence]:
    """The same of one site, as evidence. [WIDTH]"""
    crest, kurtosis, db, step = (float(v) for v in spread)
    return [
        Evidence("amax_over_rms", round(crest, 1), None, "ratio", int(step)),
        Evidence("kurtosis", round(kurtosis, 1), f"{SPREAD_KURTOSIS:g} or less", "1", int(step)),
        Evidence("spread_sqnr_db", round(db, 2), None, "dB", int(step)),
    ]
