"""Jumps: numbers of a step that leave their own recent band.

Shapes:     slab rows [sites] of ROW, and the scalars of a step -> score [sites]
Thread:     training

What every step has of every site (the light row) is held against the last few steps of that site, all sites at once. A
score is the distance from the running middle in units of what is allowed: a multiple of the spread that this site has
shown, at least a floor. So weights, which move by hundredths of an octave, jump where gradients, which move by whole
octaves, do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fp8watch.kernels.cpu_jumps import BandMemory
from fp8watch_agent.record import Measured

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
        rule = float(LEARNED_STEPS), float(WINDOW_STEPS), SPREADS, LEARNED_SPREADS
        self.memory = BandMemory(self.floors, self._middle, self._spread, self._count, rule)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Numbers that are judged: enough of them were seen. [n]"""
        return np.asarray(self._count >= LEARNED_STEPS)

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

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Sites of whose amax enough is known to judge it. [sites]"""
        known: npt.NDArray[np.bool_] = self._bands.known[0]
        return known

    def see(self, rows: Rows, broken: npt.NDArray[np.bool_]) -> Floats:
        """Judge one step, then learn from it.

        Args:
            rows: [sites] of ROW.
            broken: [sites], those that are no measure of anything.

        Returns:
            [sites] float32: above 1 where one of a site's numbers jumped; 0 where nothing is known.
        """
        ends = float(_LEAST_AMAX), float(_MOST_AMAX)
        if (found := self._bands.memory.see_rows(rows, broken, ends, _FEET)) is not None:
            return found
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
_MOST = 1e30  # of a loss
_GRAD_NORM = 2.0  # octaves


class Band:
    """As `Bands` of one number: numpy takes longer to be called than this to be computed."""

    def __init__(self) -> None:
        self._middle = self._spread = 0.0
        self._count = 0

    def see(self, value: float, floor: float) -> float:
        """Judge, then learn.

        Args:
            value: finite.
            floor: what is allowed at least.

        Returns:
            Above 1 where it jumped; 0 where too little is known.
        """
        away = value - self._middle
        allowed, count = max(SPREADS * self._spread, floor), self._count
        limit = allowed * (LEARNED_SPREADS / SPREADS) if count >= LEARNED_STEPS / 2 else math.inf
        rate = 1 / min(count + 1, WINDOW_STEPS)
        if count:
            self._spread += rate * (min(abs(away), limit) - self._spread)
        self._middle += rate * min(max(away, -limit), limit)
        self._count = count + 1
        return abs(away) / allowed if count >= LEARNED_STEPS else 0.0


class ScalarJumps:
    """Whether the loss or the gradient norm jumps."""

    def __init__(self) -> None:
        self._loss, self._norm = Band(), Band()

    def see(self, numbers: Mapping[str, float]) -> bool:
        """Judge one step, then learn from it. What is not finite is no jump, and is not learned."""
        loss, norm = numbers.get("loss", math.nan), numbers.get("grad_norm", math.nan)
        jumped = False
        if math.isfinite(loss):
            loss = min(max(loss, -_MOST), _MOST)
            jumped = self._loss.see(loss, max(_LOSS_SHARE * abs(loss), _LEAST_LOSS)) > 1
        if math.isfinite(norm):
            octaves = math.log2(min(max(abs(norm), 1 / _MOST), _MOST))
            jumped |= self._norm.see(octaves, _GRAD_NORM) > 1
        return jumped


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
