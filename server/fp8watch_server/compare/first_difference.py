"""Where two runs part: the first step and the first site, in the order in which a step is computed.

Shapes:     losses [T] and amax [S, T] of both sides at their common steps -> Parting
Thread:     any; pure functions

Three things count. One side is not finite where the other is. The losses leave the band of what two healthy runs are apart
(bands.py), or the amax of a site lies far out of it, and stays there. Or the median difference of the losses stays out for
long: a drift.
Where the runs were equal to the last bit before, the origin is the first value that differs; else it is the first site
that left its band and was out ever since; where none did, that left a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_server.compare import bands
from fp8watch_server.compare.sides import Amax, Floats, Steps

Flags = npt.NDArray[np.bool_]

BITS_OCTAVES = 0.01
"""Differences up to here are those of rounding: of another order of sums."""
BACK = 64
"""Steps before a parting in which its origin is sought."""
LAG = 8
"""Steps by which a site may have come back before the runs were seen to part."""


@dataclass(frozen=True)
class Parting:
    """What was found. Steps are numbers of steps, sites are rows of what was compared."""

    identical: int = 0
    """Common steps, from the first one on, in which every value that was compared is equal to the last bit."""
    differs_at: int | None = None
    """The step after these, where there are any."""
    differs_in: tuple[int, ...] = ()
    """Sites that differ there, in the order of execution; none: the loss alone does."""
    step: int | None = None
    """Where they part; None: they do not."""
    sites: tuple[int, ...] = ()
    """What was out first, in the order of execution; none: the loss alone."""
    by: str = ""
    """What is out: nonfinite | amax | loss | drift."""
    seen_at: int | None = None
    """Where they were seen to part: at the step itself, or later."""
    within_at: int | None = None
    """The step before at which the first site was measured on both sides; None: it never was."""
    loss_step: int | None = None
    """Where the losses part, or begin to drift apart."""
    weights_differ: int | None = None
    """Weights that differ at the first step of both; None: not known, because one began earlier."""
    num_weights: int = 0


def find(
    steps: Steps,
    loss: tuple[Floats, Floats],
    amax: tuple[Amax, Amax],
    operands: Sequence[str],
    *,
    from_the_start: bool,
    same_data: bool = False,
) -> Parting:
    """Compare two sides.

    Args:
        steps: common to both, ascending [T].
        loss: of each side [T]; NaN where a loss is NaN. What was not logged is given as equal on both sides.
        amax: of each side [S, T], sites in the order of execution.
        operands: of each site [S].
        from_the_start: the first of `steps` is the first one of both.
        same_data: both are known to have seen the same batches; so they are where they were equal to the last bit.
    """
    if not len(steps):
        return Parting()
    a, b = amax
    both = a.measured & b.measured
    one_bad = both & (a.bad != b.bad)
    ratio = np.where(both, a.level - b.level, np.nan)
    same_bits = ~both | ((a.bad == b.bad) & ((a.level == b.level) | np.isnan(a.level) & np.isnan(b.level)))
    equal = _same(*loss) & same_bits.all(axis=0)
    identical = int(np.argmin(equal)) if not equal.all() else len(steps)
    if not both[:, :identical].any() and not loss[0][:identical].any():
        identical = 0  # nothing was measured there that could have differed
    kinds = np.array([operand == "weight" for operand in operands], dtype=bool)
    start: dict[str, int] = {}
    if from_the_start and kinds.any() and both[kinds, 0].any():
        start = {
            "weights_differ": int((kinds & ~same_bits[:, 0]).sum()),
            "num_weights": int((kinds & both[:, 0]).sum()),
        }
    strangers = start.get("weights_differ", 0) > 0
    floor = np.array([bands.WIDE.get(operand, bands.WIDE["output"]) for operand in operands], dtype=np.float64)
    wide = _far(ratio, floor, floor, kinds)
    same_data = same_data or identical > 0
    at_site = _by_sites(np.full_like(wide, np.nan) if strangers else wide if same_data else wide / 2, one_bad)
    by_loss, by_drift = _by_loss(*loss, same_data=same_data)
    found = {"nonfinite": at_site[0], "amax": at_site[1], "loss": by_loss, "drift": by_drift}
    candidates = [(at, kind) for kind, at in found.items() if at is not None]
    losses_at = min((at for at in (by_loss, by_drift) if at is not None), default=None)
    common: dict[str, Any] = {
        "identical": identical,
        "loss_step": None if losses_at is None else int(steps[losses_at]),
        **start,
    }
    if 0 < identical < len(steps):
        differ = np.flatnonzero(~same_bits[:, identical])
        common |= {"differs_at": int(steps[identical]), "differs_in": tuple(differ.tolist())}
    if not candidates:
        return Parting(**common)
    seen, by = min(candidates)
    step = seen
    sites: tuple[int, ...] = ()
    if 0 < identical <= seen and not _only_bits(ratio, one_bad, identical, seen):
        step, sites = identical, common["differs_in"]
    elif by == "nonfinite":
        sites = tuple(np.flatnonzero(one_bad[:, seen]).tolist())
    elif not strangers:
        step, sites = _origin(ratio, wide, floor, kinds, seen)
    within = None
    if sites and len(before := np.flatnonzero(both[sites[0], :step])):
        within = int(steps[before[-1]])
    return Parting(step=int(steps[step]), sites=sites, by=by, seen_at=int(steps[seen]), within_at=within, **common)


def _far(ratio: Floats, floor: Floats, at_first: Floats, weights: Flags) -> Floats:
    """How far each site is out: a weight by its jumps, the others by their band."""
    far = bands.beyond(ratio, floor, at_first)
    far[weights] = bands.jumps(ratio[weights], bands.WIDE["weight"])
    return far


def _same(a: Floats, b: Floats) -> Flags:
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _by_sites(far: Floats, one_bad: Flags) -> tuple[int | None, int | None]:
    """First column in which a site is not finite on one side only, and first in which a site is out for good."""
    bad = np.flatnonzero(one_bad.any(axis=0))
    first: int | None = None
    for row in far:
        at = np.flatnonzero(~np.isnan(row))
        place = bands.first_lasting(row[at] > bands.LASTING, row[at] > bands.AT_ONCE)
        if place is not None and (first is None or at[place] < first):
            first = int(at[place])
    return (int(bad[0]) if len(bad) else None), first


def _by_loss(a: Floats, b: Floats, *, same_data: bool) -> tuple[int | None, int | None]:
    """First column in which the losses are out for good, and first from which they drift apart."""
    finite = np.isfinite(a) & np.isfinite(b)
    one_only = np.isfinite(a) != np.isfinite(b)
    difference = np.where(finite, a - b, 0.0)
    band = bands.loss_band(a, b, same_data=same_data)
    out = finite & (np.abs(difference) > band)
    at = bands.first_lasting(out | one_only, one_only)
    return at, bands.drift(difference[finite], np.fmin(np.abs(a), np.abs(b))[finite])


def _only_bits(ratio: Floats, one_bad: Flags, at: int, seen: int) -> bool:
    """Whether what differs first is rounding, and the parting comes much later."""
    first = np.abs(ratio[:, at : at + LAG])
    largest = float(np.nanmax(first)) if np.isfinite(first).any() else 0.0
    return seen - at > BACK // 2 and largest < BITS_OCTAVES and not one_bad[:, at].any()


def _origin(ratio: Floats, wide: Floats, floor: Floats, weights: Flags, seen: int) -> tuple[int, tuple[int, ...]]:
    """The first column, and its sites, from which on something was out of its band until the runs were seen to part; where
    nothing was, out of a narrower one."""
    first = max(0, seen - BACK - bands.WINDOW)
    begun = _begun(wide[:, first : seen + 1])
    if not begun:
        part = ratio[:, first : seen + 1] - np.where(weights, _first_of(ratio[:, first : seen + 1]), 0.0)[:, None]
        narrow = _far(part, floor * bands.NARROW_SHARE, floor, weights)
        narrow[weights] /= bands.LASTING
        begun = _begun(narrow)
    if not begun:
        return seen, ()
    step = min(begun.values())
    return first + step, tuple(site for site, at in begun.items() if at == step)


def _begun(far: Floats) -> dict[int, int]:
    """Site -> the column from which on it was out, of those that are out at the end, or were LAG columns before."""
    begun: dict[int, int] = {}
    for site, row in enumerate(far):
        at = np.flatnonzero(~np.isnan(row))
        out = np.flatnonzero(row[at] > 1)
        if not len(out) or at[out[-1]] + LAG < len(row) - 1:
            continue
        k = int(out[-1])
        while k > 0 and row[at[k - 1]] > 1:
            k -= 1
        begun[site] = int(at[k])
    return begun


def _first_of(ratio: Floats) -> Floats:
    """The first that was measured of each row, 0 where none was. [S]"""
    known = ~np.isnan(ratio)
    return np.where(known.any(axis=1), ratio[np.arange(len(ratio)), np.argmax(known, axis=1)], 0.0)
