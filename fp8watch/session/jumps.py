"""Jumps: numbers of a step that leave their own recent band, and for which steps afterwards everything is looked at.

Shapes:     slab rows [sites] of ROW, and the scalars of a step -> score [sites]
Thread:     training

What every step has of every site (the light row) is held against the last few steps of that site, all sites at once. A
score is the distance from the running middle in units of what is allowed: a multiple of the spread that this site has
shown, at least a floor. So weights, which move by hundredths of an octave, jump where gradients, which move by whole
octaves, do not.

A jump begins a burst: `BURST_STEPS` steps with full statistics and tile maps, whatever `every` says. Bursts are rationed,
so that a restless run stays near its budget. What breaks (non-finite values, a broken invariant) has a ration of its
own, and needs no distance; beyond that only outputs are looked at. The host learns of a step on a GPU one or two steps
later, so the burst begins that much later; tile maps of the jump's own step are held until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fp8watch.observer.nonfinite_checks import ALERT_STEPS
from fp8watch_agent.record import Measured

BURST_STEPS = 16
APART_STEPS = 64  # from the beginning of one burst to that of the next, for jumps
MAX_BURSTS = 4  # that a quiet run has saved up
REFILL_STEPS = 256  # for one more of them

WINDOW_STEPS = 16  # about how many steps a band remembers
LEARNED_STEPS = 16  # before a number is judged
SPREADS = 8.0  # of the mean distance from the middle: what is allowed
LEARNED_SPREADS = 3.0  # further out than this is learned as this: one outlier does not widen a band

Rows = npt.NDArray[np.void]
Floats = npt.NDArray[np.float32]


class Bands:
    """The running middle and spread of n numbers.

    Args:
        floors: [n], what is allowed at least.
    """

    def __init__(self, floors: npt.ArrayLike) -> None:
        self.floors = np.array(floors, dtype=np.float32)
        shape = self.floors.shape
        self._middle, self._spread = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._count = np.zeros(shape, np.float32)

    def see(self, values: Floats, there: npt.NDArray[np.bool_]) -> Floats:
        """Judge, then learn.

        Args:
            values: [n], finite where `there`.
            there: [n], which of them were measured.

        Returns:
            [n] float32: above 1 where a number jumped; 0 where it was not measured or too little is known.
        """
        known = there.astype(np.float32)
        away = (values - self._middle) * known
        size = np.abs(away)
        allowed = np.maximum(SPREADS * self._spread, self.floors)
        score: Floats = np.where(self._count >= LEARNED_STEPS, size / allowed, np.float32(0))
        limit = np.where(self._count >= LEARNED_STEPS / 2, allowed * (LEARNED_SPREADS / SPREADS), np.float32(math.inf))
        rate = known / np.minimum(self._count + 1, WINDOW_STEPS)
        self._spread += rate * (np.minimum(size, limit) - self._spread) * (self._count > 0)
        self._middle += rate * np.clip(away, -limit, limit)
        self._count += known
        return score


# Floors in octaves. A share has a foot added, below which changes say nothing. Scales are left out: they follow the amax.
_FLOORS = (1.5, 5.0, 3.0, 3.0)  # of amax, underflow, saturation, clamped tiles
_FEET = np.array([[0.0], [2.0**-10], [2.0**-20], [2.0**-7]], np.float32)
_LEAST_AMAX, _MOST_AMAX = np.float32(2.0**-126), np.float32(2.0**127)
_CAST = int(Measured.COUNTS | Measured.CODES)  # codes alone do not tell what the cast did


class RowJumps:
    """Which sites jump.

    Args:
        num_rows: of the slab.
    """

    def __init__(self, num_rows: int) -> None:
        self._bands = Bands(np.repeat(np.array(_FLOORS, np.float32)[:, None], num_rows, axis=1))
        self._shares = np.zeros((len(_FLOORS), num_rows), np.float32)

    def see(self, rows: Rows, broken: npt.NDArray[np.bool_]) -> Floats:
        """Judge one step, then learn from it.

        Args:
            rows: [sites] of ROW.
            broken: [sites], those that are no measure of anything.

        Returns:
            [sites] float32: above 1 where one of a site's numbers jumped; 0 where nothing is known.
        """
        measured, shares = rows["measured"], self._shares
        counts = ((measured & _CAST) == int(Measured.COUNTS)) & ~broken
        amax = ((measured & int(Measured.AMAX)) != 0) & ~broken
        elements = np.maximum(rows["num_nonzero"], 1)
        np.divide(rows["num_underflow"], elements, out=shares[1], casting="same_kind")
        np.divide(rows["num_saturated"], elements, out=shares[2], casting="same_kind")
        clamped, tiles = rows["num_zero_tiles"] + rows["num_eps_tiles"], np.maximum(rows["num_tiles"], 1)
        np.divide(clamped, tiles, out=shares[3], casting="same_kind")
        shares += _FEET
        np.clip(rows["amax_max"], _LEAST_AMAX, _MOST_AMAX, out=shares[0])
        score: Floats = self._bands.see(np.log2(shares), np.stack([amax, counts, counts, amax])).max(axis=0)
        return score


_LOSS_SHARE, _LEAST_LOSS = 0.05, 1e-6  # of the loss: what its band allows at least
_MOST = 1e30  # of a loss: float32 must hold what is computed of it
_GRAD_NORM = 2.0  # octaves


class ScalarJumps:
    """Whether the loss or the gradient norm jumps."""

    def __init__(self) -> None:
        self._bands = Bands([_LEAST_LOSS, _GRAD_NORM])

    def see(self, numbers: Mapping[str, float]) -> bool:
        """Judge one step, then learn from it. What is not finite is no jump, and is not learned."""
        loss, norm = numbers.get("loss", math.nan), numbers.get("grad_norm", math.nan)
        there = np.array([math.isfinite(loss), math.isfinite(norm)])
        loss = min(max(loss, -_MOST), _MOST) if there[0] else 0.0
        norm = math.log2(min(max(abs(norm), 1 / _MOST), _MOST)) if there[1] else 0.0
        self._bands.floors[0] = max(_LOSS_SHARE * abs(loss), _LEAST_LOSS)
        return bool((self._bands.see(np.array([loss, norm], np.float32), there) > 1).any())


class Follow:
    """For which steps everything is looked at, whatever `every` says: after what broke, and after a jump."""

    def __init__(self) -> None:
        self.outputs_until = -1  # the last step in which every output and gradient is looked at
        self.full_until = -1  # the last step with full statistics
        self._begun = -APART_STEPS
        self._saved = self._saved_for_breaks = float(MAX_BURSTS)
        self._seen = 0

    def broke(self, step: int, newest: int, *, fresh: bool) -> None:
        """Something is broken in `step`.

        Args:
            step: where it is.
            newest: the step that was begun last.
            fresh: it was sound in the step before. What stays broken is looked at by its outputs only.
        """
        self.reached(newest)
        self.outputs_until = max(self.outputs_until, step + ALERT_STEPS)
        if fresh and self._saved_for_breaks >= 1:
            self._saved_for_breaks -= 1
            self._begin(newest)

    def jumped(self, newest: int) -> bool:
        """Something jumped. True where a burst begins; False where one is on, or was just now, or none is saved up."""
        self.reached(newest)
        if newest - self._begun < APART_STEPS or self._saved < 1:
            return False
        self._saved -= 1
        self._begin(newest)
        return True

    def _begin(self, newest: int) -> None:
        self._begun = newest
        self.full_until = newest + BURST_STEPS
        self.outputs_until = max(self.outputs_until, self.full_until)

    def reached(self, newest: int) -> None:
        """Training is at this step: what is saved up grows, and where training went back nothing is on any more."""
        if newest < self._seen:
            self._begun, self.full_until, self.outputs_until = -APART_STEPS, -1, -1
        more = max(0, newest - self._seen) / REFILL_STEPS
        self._saved = min(MAX_BURSTS, self._saved + more)
        self._saved_for_breaks = min(MAX_BURSTS, self._saved_for_breaks + more)
        self._seen = newest


def most_telling(score: Floats, order: npt.NDArray[np.int32], num: int) -> list[int]:
    """Of the sites that jumped, the first in order of execution and the furthest out; where none did, the furthest out.

    Args:
        score: [sites], as `RowJumps.see` gives it.
        order: [sites], place of the first call; −1 where there was none.
        num: how many at most.
    """
    furthest = [int(row) for row in np.argsort(-score)[:num] if score[row] > 0]
    jumped = np.flatnonzero(score > 1)
    if len(jumped) <= num:
        return furthest
    first = jumped[np.argsort(order[jumped], kind="stable")[: num // 2]].tolist()
    return list(dict.fromkeys([*first, *furthest]))[:num]
